"""A real Docker engine (Debian's docker.io) for tests: no network, its own socket and state."""

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker

APPLETS = ("sh", "cat", "echo", "sleep", "mkdir", "chmod", "chown", "ln", "rm", "true", "hostname")


@dataclass(frozen=True)
class TestingEngine:
    """An engine that runs, and a client of its own to look at it from the side."""

    __test__ = False
    host: str
    client: docker.DockerClient

    def environment(self) -> dict[str, str]:
        return {"DOCKER_HOST": self.host}

    def make_image(self, name: str, files: Mapping[str, bytes] = {}, *changes: str) -> str:
        """Import a busybox image under ``name`` and return its ID."""
        data = busybox_tar(files)
        repository, _, tag = name.partition(":")
        self.client.api.import_image_from_data(
            data, repository=repository, tag=tag or "latest", changes=list(changes)
        )
        return self.client.images.get(name).id

    def containers(self) -> list[str]:
        return [item.name for item in self.client.containers.list(all=True)]


def busybox_tar(files: Mapping[str, bytes] = {}) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("bin", "etc", "tmp"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        content = {"bin/busybox": Path("/bin/busybox").read_bytes(), **files}
        content.setdefault("etc/passwd", b"root:x:0:0:root:/:/bin/sh\nweb:x:1000:1000::/:/bin/sh\n")
        content.setdefault("etc/group", b"root:x:0:\nweb:x:1000:\n")
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.startswith("bin/") else 0o644
            tar.addfile(info, io.BytesIO(data))
        for applet in APPLETS:
            info = tarfile.TarInfo(f"bin/{applet}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(info)
    return stream.getvalue()


@contextlib.contextmanager
def testing_engine() -> Iterator[TestingEngine]:
    """Start dockerd, wait until it answers, and stop exactly what was started."""
    # Short: socket paths end at 108 bytes. On the disk: an overlay on a tmpfs may not work.
    directory = Path(tempfile.mkdtemp(prefix="sbd"))
    host = f"unix://{directory}/docker.sock"
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [
            "dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none",
            "--host", host, "--data-root", str(directory / "data"),
            "--exec-root", str(directory / "exec"), "--pidfile", str(directory / "pid"),
        ],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )  # fmt: skip
    client = None
    try:
        client = _answering(process, directory)
        yield TestingEngine(host, client)
    finally:
        if client is not None:
            client.close()
        _end(process)
        log.close()
        _unmount(directory)
        shutil.rmtree(directory)


def _answering(process: subprocess.Popen, directory: Path) -> docker.DockerClient:
    deadline = time.monotonic() + 60
    while not _listens(directory / "docker.sock"):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = (directory / "log").read_text(errors="replace")[-3000:]
            raise AssertionError(f"dockerd does not answer:\n{tail}")
        time.sleep(0.05)
    client = docker.DockerClient(base_url=f"unix://{directory}/docker.sock", timeout=60)
    assert client.ping()
    return client


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def _end(process: subprocess.Popen) -> None:
    """Stop dockerd, which stops its containerd; what is left of its session is killed."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _unmount(directory: Path) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted(mounts, reverse=True):
        if mount.startswith(f"{directory}/"):
            subprocess.run(["umount", "-l", mount], check=False, timeout=30)
