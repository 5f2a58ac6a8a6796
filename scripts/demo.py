"""The whole path once, with the commands a user would type: build, push, pull, verify, fork.

`make demo` runs it. Two SMOLBUILD_HOMEs under .demo/ play two machines: the *builder* keeps its
artifact (so a second demo rebuilds nothing); the *worker* is emptied first and knows nothing but
the builder's public key: what it runs has come through the registry and through verification.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
SMOLBUILD = Path(sys.executable).parent / "smolbuild"
BUILDER = ROOT / ".demo" / "builder"
WORKER = ROOT / ".demo" / "worker"
EXAMPLE = "examples/notes-service"
NAME = "notes:demo"
FORKS = 3
QUESTION = "SELECT count(*), max(created) FROM notes"
PSQL = ("psql", "-h", "127.0.0.1", "-U", "notes", "-At", "-F", " notes, newest of ", "-c", QUESTION)
COMMAND_DEADLINE = 1800.0
REGISTRY_DEADLINE = 15.0


def main() -> int:
    """Run the demo; the exit status is that of the command that failed."""
    signal.signal(signal.SIGTERM, terminated)
    WORKER.parent.mkdir(exist_ok=True)
    shutil.rmtree(WORKER, ignore_errors=True)

    say("See what this host offers")
    host = smolbuild(BUILDER, "doctor", "--json")

    say("Build the environment and prove it: the checkpoint is restored and health-checked")
    if smolbuild(BUILDER, "key", "show", "--json", may_fail=True) is None:
        smolbuild(BUILDER, "key", "generate", "--json")
    built = smolbuild(BUILDER, "build", "-C", EXAMPLE, "-t", NAME, "--json")
    public_key = smolbuild(BUILDER, "key", "show", "--json")["publicKey"]

    with registry() as address:
        say(f"Push it to a registry (Debian's docker-registry on {address})")
        pushed = smolbuild(BUILDER, "push", NAME, f"{address}/demo/notes:v1", "--json")

        say("Pull it on a worker that has nothing but the builder's public key")
        trust(public_key)
        smolbuild(WORKER, "doctor", "--json")  # finds the acceleration now, not in the first fork
        reference = f"{address}/demo/notes@{pushed['digest']}"
        pulled = smolbuild(WORKER, "pull", reference, "--json")

    say(f"Restore {FORKS} forks and ask each one's database a question (the registry is gone)")
    ran = smolbuild(WORKER, "run", reference, "-n", str(FORKS), "--json", "--", *PSQL)

    print_tables(host, built, pushed, pulled, ran)
    failed = [fork for fork in ran["forks"] if fork["status"] != 0]
    return 1 if failed or len(ran["forks"]) != FORKS else 0


def trust(public_key: str) -> None:
    """Let the worker accept what this key signed: a public key in its key directory."""
    keys = WORKER / "keys"
    keys.mkdir(mode=0o700, parents=True)
    (keys / "builder.pub").write_text(public_key)
    print("[worker] $ cp builder.pub $SMOLBUILD_HOME/keys/", flush=True)


def terminated(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn SIGTERM into an orderly end: what was started is stopped on the way out."""
    del frame
    raise SystemExit(128 + signum)


def say(text: str) -> None:
    """Print a headline."""
    print(f"\n== {text}", flush=True)


def smolbuild(home: Path, *arguments: str, may_fail: bool = False) -> Any:
    """Run one smolbuild command as the machine ``home`` and return the JSON it printed.

    A failure ends the demo with the command's own exit status; with ``may_fail`` it gives None.
    """
    print(f"[{home.name}] $ smolbuild {shlex.join(arguments)}", flush=True)
    environment = {**os.environ, "SMOLBUILD_HOME": str(home)}
    child = subprocess.Popen(
        [str(SMOLBUILD), *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if may_fail else None,
    )
    try:
        output, _ = child.communicate(timeout=COMMAND_DEADLINE)
    finally:
        stop(child)
    if child.returncode == 0:
        return json.loads(output)
    if may_fail:
        return None
    sys.stdout.write(output.decode(errors="replace"))
    print(f"demo: that command failed with status {child.returncode}", file=sys.stderr)
    raise SystemExit(child.returncode if child.returncode > 0 else 128 - child.returncode)


@contextlib.contextmanager
def registry() -> Iterator[str]:
    """Give the address of a registry on a free loopback port; it ends with the block."""
    program = shutil.which("docker-registry")
    if program is None:
        raise SystemExit("demo: docker-registry is not installed; run scripts/setup.sh")
    with tempfile.TemporaryDirectory(prefix="smolbuild-demo-") as directory:
        address = f"127.0.0.1:{free_port()}"
        configuration = {
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": f"{directory}/data"}},
            "http": {"addr": address},
        }
        config_file = Path(directory) / "config.yml"
        config_file.write_text(json.dumps(configuration))  # JSON is YAML
        log_file = Path(directory) / "log"
        with log_file.open("wb") as log:
            # setpriv: the registry ends even when this script is killed outright.
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", program, "serve", str(config_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until_answers(child, address, log_file)
            yield address
        finally:
            stop(child)


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_answers(child: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return when the registry answers; end the demo when it died or takes too long."""
    deadline = time.monotonic() + REGISTRY_DEADLINE
    while child.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://{address}/v2/", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    tail = log.read_text(errors="replace")[-2000:]
    raise SystemExit(f"demo: the registry did not start on {address}\n{tail}")


def stop(child: subprocess.Popen[bytes]) -> None:
    """End ``child`` if it still runs: politely first, so that it can end what it started."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=15)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def print_tables(host: Any, built: Any, pushed: Any, pulled: Any, ran: Any) -> None:
    """Print what was built and how each fork did."""
    engine = next(check for check in host["checks"] if check["name"] == "acceleration")
    seconds = built["seconds"]
    sizes = built["sizes"]
    say("What was built")
    print_table(
        [
            ("host", engine["text"].partition(": ")[0]),
            ("artifact", built["name"]),
            ("provenance key", built["key"]),
            ("digest", built["digest"]),
            ("built", "no: nothing changed" if built["reused"] else f"in {seconds:.1f} s"),
            ("disk", mebibytes(sizes["disk"])),
            ("memory in use", mebibytes(sizes["memory"])),
            ("packed", mebibytes(sizes["packed"])),
            ("pushed", mebibytes(pushed["bytes_pushed"])),
            (
                "pulled",
                f"{mebibytes(pulled['bytes_pulled'])} in {pulled['seconds']:.1f} s, verified",
            ),
        ]
    )
    say("Its forks")
    rows = [("fork", "first answer", "time to ready", "how", "the database says")]
    rows += [
        (
            fork["id"],
            f"{fork['agent_ms']:.0f} ms",
            f"{fork['ready_ms']:.0f} ms",
            fork["how"],
            fork["stdout"].strip() or f"status {fork['status']}",
        )
        for fork in ran["forks"]
    ]
    print_table(rows)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())


def mebibytes(count: int) -> str:
    """Return a byte count for people."""
    return f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
