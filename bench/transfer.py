"""How fast and how large are push and pull of one stream, beside skopeo's?

    .venv/bin/python bench/transfer.py [--mib 1024] [--chunk-mib 16] [--threads 2] [-n 6]

Random bytes in chunks, to and from a docker-registry on loopback. Every round has fresh bytes,
every run is a process of its own, and ours and skopeo's take turns in going first, so use an even
number. Both start from and end in files. Printed are medians of wall time and the largest resident
memory; the kernel counts no child as smaller than the process that started it, about 25 MiB.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.events import silent
from smolbuild.core.process import kill_group, spawn
from smolbuild.model.oci import (
    EMPTY,
    EMPTY_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    describe,
    encode_json,
)
from smolbuild.registry.client import RegistryClient
from smolbuild.registry.transfer import pull_blobs, push_blobs

MIB = 1024 * 1024
LAYER = "application/octet-stream"


def main() -> None:
    parser = argparse.ArgumentParser(description="Push and pull, measured beside skopeo.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk-mib", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-n", "--times", type=int, default=6)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, threads=options.threads)
        return
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        with registry(directory) as host:
            rounds = measure(host, directory, options)
    print(f"{options.mib} MiB in chunks of {options.chunk_mib} MiB, {options.threads} threads")
    for what, runs in rounds.items():
        seconds = statistics.median(wall for wall, _ in runs)
        peak = max(memory for _, memory in runs) / MIB
        print(
            f"{what:<16} median {seconds:6.2f} s   {options.mib / seconds:7.0f} MiB/s"
            f"   peak {peak:6.0f} MiB   n {len(runs)}"
        )


def measure(
    host: str, directory: Path, options: argparse.Namespace
) -> dict[str, list[tuple[float, int]]]:
    tools = ["smolbuild", *(["skopeo"] if shutil.which("skopeo") else [])]
    rounds: dict[str, list[tuple[float, int]]] = {}
    for number in range(options.times):
        # Fresh bytes each time: skopeo remembers where it has seen a blob and mounts it from there.
        layout = make_layout(directory / "layout", options.mib, options.chunk_mib)
        for tool in tools if number % 2 else reversed(tools):
            repository = f"bench/{tool}-{number}"
            for action in ("push", "pull"):
                target = directory / "pulled"
                argv = command(tool, action, host, repository, layout, target, options.threads)
                rounds.setdefault(f"{tool} {action}", []).append(run(argv))
                shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(layout)
        shutil.rmtree(directory / "data")
    return rounds


def command(
    tool: str, action: str, host: str, repository: str, layout: Path, target: Path, threads: int
) -> Sequence[str]:
    if tool == "smolbuild":
        place = layout if action == "push" else target
        worker = ["--worker", action, host, repository, f"{layout}:{place}"]
        return [sys.executable, __file__, "--threads", str(threads), *worker]
    remote, local = f"docker://{host}/{repository}:v1", f"oci:{layout}:v1"
    if action == "push":
        return [
            "skopeo",
            "copy",
            "-q",
            "--preserve-digests",
            "--dest-tls-verify=false",
            local,
            remote,
        ]
    return ["skopeo", "copy", "-q", "--src-tls-verify=false", remote, f"oci:{target}:v1"]


def run(argv: Sequence[str]) -> tuple[float, int]:
    """Return wall seconds and peak resident bytes of one process."""
    started = time.perf_counter()
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{argv[0]} failed with {child.returncode}")
    return wall, usage.ru_maxrss * 1024


def work(action: str, host: str, repository: str, places: str, *, threads: int) -> None:
    """Do one push or pull with smolbuild's transport, in this process."""
    source, _, target = places.partition(":")
    layout, kept = Path(source), Path(target)
    top = json.loads((layout / "index.json").read_bytes())["manifests"][0]
    manifest = (layout / "blobs" / "sha256" / top["digest"][7:]).read_bytes()
    value = json.loads(manifest)
    blobs = [
        Descriptor(media_type=LAYER, digest=Digest(entry["digest"]), size=entry["size"])
        for entry in [value["config"], *value["layers"]]
    ]

    @contextlib.contextmanager
    def sink(blob: Descriptor) -> Iterator[Callable[[bytes], object]]:
        with (kept / blob.digest[7:]).open("wb") as stream:
            yield stream.write

    def opener(blob: Descriptor) -> Callable[[], object]:
        return (layout / "blobs" / "sha256" / blob.digest[7:]).open

    with RegistryClient(host, threads=threads) as client:
        if action == "push":
            openers = [(blob, lambda blob=blob: opener(blob)("rb")) for blob in blobs]
            push_blobs(client, repository, openers, emit=silent)
            client.put_manifest(repository, "v1", manifest, MANIFEST_TYPE)
        else:
            kept.mkdir()
            client.get_manifest(repository, "v1")
            pull_blobs(client, repository, blobs, sink, emit=silent)


def make_layout(layout: Path, mib: int, chunk_mib: int) -> Path:
    """Write an OCI layout whose layers are random bytes."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers = []
    for _ in range(max(1, mib // chunk_mib)):
        hasher = hashlib.sha256()
        with (layout / "new").open("wb") as stream:
            for _ in range(chunk_mib):
                piece = os.urandom(MIB)
                hasher.update(piece)
                stream.write(piece)
        (layout / "new").rename(blobs / hasher.hexdigest())
        digest = Digest("sha256:" + hasher.hexdigest())
        layers.append(Descriptor(media_type=LAYER, digest=digest, size=chunk_mib * MIB))
    manifest = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
    )
    for data in (EMPTY, manifest):
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
    entry = describe(manifest, MANIFEST_TYPE).to_json()
    entry["annotations"] = {"org.opencontainers.image.ref.name": "v1"}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    (layout / "index.json").write_bytes(encode_json(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return layout


@contextlib.contextmanager
def registry(directory: Path) -> Iterator[str]:
    """Run docker-registry on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
    address = f"{host}:{port}"
    config = directory / "registry.yml"
    config.write_text(
        json.dumps(
            {
                "version": "0.1",
                "log": {"level": "error", "accesslog": {"disabled": True}},
                "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
                "http": {"addr": address},
            }
        )
    )
    child = spawn(["docker-registry", "serve", str(config)])
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
                break
            if time.monotonic() > deadline or child.poll() is not None:
                raise SystemExit("docker-registry did not start")
            time.sleep(0.05)
        yield address
    finally:
        kill_group(child)


if __name__ == "__main__":
    main()
