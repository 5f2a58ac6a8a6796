"""What does a build cost when nothing changed? And beside it, `docker build` of the same files.

    .venv/bin/python bench/noop_build.py [DIRECTORY] [-n TIMES] [--many FILES] [--docker]

Builds DIRECTORY (default: examples/notes-service) once if need be, then takes turns: the floor
(`python -c pass`), `smolbuild --version`, `smolbuild build`, `smolbuild plan --json`. With --many a
second project declares FILES files of 1 GiB in all (10000 is the figure of the requirements; needs
a static /bin/busybox, as a root to build on). With --docker a private Docker engine (root and
Debian's docker.io) builds DIRECTORY's files with nothing changed, by the classic builder and by
BuildKit. Commands take turns because a machine that is busy is busy for all of them. SMOLBUILD_HOME
is used as it is set; a round that had to build something ends the benchmark.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from measure import COMMAND_DEADLINE, SMOLBUILD, summary

GIB = 1 << 30
SMOLFILE = """\
image = "./rootfs/"
cpus = 1
memory = 128
overlay = 1

[smolbuild]
name = "bench/many"

[[smolbuild.step]]
name = "one"
run = "echo one > /one"
inputs = ["data"]
"""
DOCKERFILE = """\
FROM scratch
COPY . /srv/
CMD ["/srv/none"]
"""
ENGINE_START_SECONDS = 60.0

Run = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of builds that have nothing to do.")
    parser.add_argument("directory", nargs="?", default="examples/notes-service", type=Path)
    parser.add_argument("-n", "--times", type=int, default=20)
    parser.add_argument("--many", type=int, default=0, metavar="FILES")
    parser.add_argument("--docker", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        runs: dict[str, Run] = {
            "python -c pass": lambda: execute([sys.executable, "-c", "pass"]),
            "smolbuild --version": lambda: execute([str(SMOLBUILD), "--version"]),
            **smolbuild_runs(options.directory.absolute(), "notes-service"),
        }
        if options.many:
            many = scratch / "many"
            write_many(many, options.many)
            runs |= smolbuild_runs(many, f"{options.many} files")
        if options.docker:
            host = stack.enter_context(engine(scratch))
            runs |= docker_runs(options.directory, scratch / "context", host)
        report(take_turns(runs, options.times))


def smolbuild_runs(project: Path, what: str) -> dict[str, Run]:
    def reused() -> None:
        if not json.loads(execute([str(SMOLBUILD), "build", "--json"], cwd=project))["reused"]:
            raise SystemExit("a round built something: this measured a build, not a reuse")

    def planned() -> None:
        if json.loads(execute([str(SMOLBUILD), "plan", "--json"], cwd=project))["artifact"] is None:
            raise SystemExit("a round would build something: this measured no reuse")

    execute([str(SMOLBUILD), "build", "--json"], cwd=project)
    return {f"build, {what}": reused, f"plan --json, {what}": planned}


def write_many(project: Path, files: int) -> None:
    """Write a project of ``files`` declared files, 1 GiB in all, no two alike."""
    binaries = project / "rootfs" / "bin"
    binaries.mkdir(parents=True)
    shutil.copy("/bin/busybox", binaries / "busybox")
    (binaries / "sh").symlink_to("busybox")
    (project / "rootfs" / "etc").mkdir()
    (project / "rootfs" / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (project / "Smolfile").write_text(SMOLFILE)
    filling = os.urandom(GIB // files)
    for number in range(files):
        path = project / "data" / f"{number // 100:04}" / f"{number % 100:02}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "big") + filling[8:])


def docker_runs(project: Path, context: Path, host: str) -> dict[str, Run]:
    """Return `docker build` of the project's files by both builders; each has built it once."""
    docker = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"
    ignored = shutil.ignore_patterns("Smolfile*", "README*", "Dockerfile")
    shutil.copytree(project, context, ignore=ignored)
    (context / "Dockerfile").write_text(DOCKERFILE)
    runs: dict[str, Run] = {}
    for name, switch in (("classic", "0"), ("BuildKit", "1")):
        environment = {**os.environ, "DOCKER_HOST": host, "DOCKER_BUILDKIT": switch}
        command = [docker, "build", "-q", "-t", f"bench-{name.lower()}", str(context)]

        def run(command: list[str] = command, environment: dict[str, str] = environment) -> None:
            execute(command, env=environment)

        try:
            run()
        except SystemExit as error:
            print(f"no figures for docker build, {name}: {error}")
            continue
        runs[f"docker build, {name}"] = run
    return runs


@contextlib.contextmanager
def engine(scratch: Path) -> Iterator[str]:
    """Give the address of a Docker engine of our own, ended with the block."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise SystemExit("--docker needs root and dockerd (apt-get install docker.io)")
    host = f"unix://{scratch}/d.sock"
    with (scratch / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                "dockerd", "--iptables=false", "--bridge=none", "--ip-masq=false", "-H", host,
                "--data-root", f"{scratch}/docker", "--exec-root", f"{scratch}/exec",
                "--pidfile", f"{scratch}/pid",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + ENGINE_START_SECONDS
        while not (scratch / "d.sock").exists() or not responds(host):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((scratch / "dockerd.log").read_text()[-2000:])
            time.sleep(0.2)
        yield host
    finally:
        daemon.terminate()
        daemon.wait(60)
        # What it mounted would keep the temporary directory from going.
        subprocess.run(["umount", "-R", f"{scratch}/docker"], check=False, capture_output=True)


def responds(host: str) -> bool:
    command = ["docker", "-H", host, "version"]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def execute(
    command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> bytes:
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=COMMAND_DEADLINE,
        check=False,
    )
    if ended.returncode != 0:
        sys.stderr.write(ended.stderr.decode(errors="replace"))
        raise SystemExit(f"{' '.join(command)} failed with {ended.returncode}")
    return ended.stdout


def take_turns(runs: dict[str, Run], times: int) -> dict[str, list[float]]:
    for run in runs.values():  # fills the page cache and the stat cache
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - started) * 1000)
    return taken


def report(taken: dict[str, list[float]]) -> None:
    for name, values in taken.items():
        print(summary(name, values))
    middle = {name: statistics.median(values) for name, values in taken.items()}
    ours = middle["build, notes-service"]
    for name, value in middle.items():
        if name.startswith(("python", "smolbuild", "docker")):
            print(f"build, notes-service / {name:<28} {ours / value:.2f}")


if __name__ == "__main__":
    main()
