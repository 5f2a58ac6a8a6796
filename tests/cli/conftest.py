"""A tiny machine (static busybox over a rootfs directory), built once a run through the command."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from smolbuild.core.home import Home

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "schemas" / "cli.v1.json").read_text())

SMOLFILE = """\
image = "./rootfs/"
cpus = 1
memory = 128
overlay = 1
env = ["GREETING=hello"]

[smolbuild]
name = "test/tiny"
copy = [{ from = "www", to = "/srv/www" }]

[[smolbuild.step]]
name = "one"
run = "echo one > /one; echo said by step one"

[[smolbuild.step]]
name = "two"
inputs = ["two.txt"]
copy = [{ from = "two.txt", to = "/srv/" }]
run = "cat /srv/two.txt > /two"

[[smolbuild.service]]
name = "web"
run = "exec httpd -f -p 8000 -h /srv/www"
ready = { port = 8000 }

[smolbuild.health]
http = { port = 8000, path = "/index.html", contains = "it works" }
interval = "200ms"
timeout = "2s"
retries = 5
"""

APPLETS = (
    "sh cat echo ls sleep httpd hostname id kill mkdir rm cp mv grep head tail wc touch test true "
    "false env printf seq date ps chmod chown ln readlink stat sync dd sha256sum tr sort yes nc"
)


def make_project(directory: Path, smolfile: str = SMOLFILE) -> Path:
    """Fill ``directory`` with a Smolfile and a root of nothing but busybox."""
    binaries = directory / "rootfs" / "bin"
    binaries.mkdir(parents=True)
    shutil.copy("/bin/busybox", binaries / "busybox")
    for applet in APPLETS.split():
        (binaries / applet).symlink_to("busybox")
    etc = directory / "rootfs" / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0:root:/:/bin/sh\nweb:x:1000:1000:web:/:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\nweb:x:1000:\n")
    (directory / "www").mkdir()
    (directory / "www" / "index.html").write_text("it works\n")
    (directory / "two.txt").write_text("two\n")
    (directory / "Smolfile").write_text(smolfile)
    return directory


@dataclasses.dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    def document(self, definition: str) -> dict:
        """Return the one JSON document on standard output, checked against the schema."""
        value = json.loads(self.stdout)
        jsonschema.validate(value, {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{definition}"}]})
        return value


@dataclasses.dataclass(frozen=True)
class Smolbuild:
    """Runs the command with a home and a QEMU whose every start is noted."""

    home: Home
    programs: Path

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SMOLBUILD_HOME": str(self.home.root),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }

    def __call__(self, *args: str, cwd: Path | None = None, stdin: str | None = None) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "smolbuild.cli", *args],
            env=self.environment(),
            cwd=cwd,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        # A run in the background of a script (CI) ignores SIGINT and would hand that down; a
        # person's terminal does not.
        return subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-m", "smolbuild.cli", *args],
            env=self.environment(),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def starts(self) -> int:
        """Return how often QEMU was started so far."""
        log = self.programs / "starts"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def boots(self) -> int:
        """Return how often a guest with a kernel was started: no probe, no version."""
        log = self.programs / "starts"
        return log.read_text().count(" -kernel ") if log.exists() else 0

    def machines(self) -> list[str]:
        """Return the command lines of the QEMU processes of this home."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "qemu-system" in line and str(self.home.root) in line:
                found.append(f"{process.name} {line}")
        return found


def noted_qemu(directory: Path) -> Path:
    """Put a qemu-system-x86_64 into ``directory`` that notes its start and becomes the real one."""
    directory.mkdir()
    real = shutil.which("qemu-system-x86_64")
    assert real
    program = directory / "qemu-system-x86_64"
    program.write_text(f'#!/bin/sh\necho "$$ $*" >> {directory}/starts\nexec {real} "$@"\n')
    program.chmod(0o755)
    return directory


@pytest.fixture(scope="session")
def cli_home(homes: Path, home: Home) -> Home:
    del homes
    return home


@pytest.fixture(scope="session")
def smolbuild(cli_home: Home, tmp_path_factory) -> Smolbuild:
    """Give the command with the run's shared home."""
    return Smolbuild(cli_home, noted_qemu(tmp_path_factory.mktemp("bin") / "bin"))


@pytest.fixture
def fresh(fresh_home: Home, smolbuild: Smolbuild) -> Smolbuild:
    """Give the command with an empty home of its own."""
    return Smolbuild(fresh_home, smolbuild.programs)


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """Give the directory of the tiny project; tests must not change it."""
    return make_project(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def own_project(tmp_path) -> Path:
    """Give a copy of the tiny project that a test may change."""
    directory = tmp_path / "project"
    directory.mkdir()
    return make_project(directory)


@pytest.fixture(scope="session")
def built(smolbuild: Smolbuild, project: Path) -> dict:
    """Give what the first build of the tiny project said."""
    done = smolbuild("build", "-C", str(project), "-t", "tiny:v1", "--json")
    assert done.status == 0, done.stderr
    return done.document("build")


def stop(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> int:
    """Send a signal, and wait for the end with a deadline."""
    process.send_signal(number)
    try:
        return process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
