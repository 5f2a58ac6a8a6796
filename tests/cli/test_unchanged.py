"""A build with nothing to do: what it must not load or start, so that it stays quick."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smolbuild.cli.options import home as command_home

HEAVY = (
    "asyncio", "cryptography", "difflib", "docker", "email", "http", "logging", "lzma", "oras",
    "requests", "rich", "shutil", "socket", "ssl", "subprocess", "tarfile", "tempfile", "urllib3",
    "zstandard",
    "smolbuild.attempt", "smolbuild.build.builder", "smolbuild.build.pack",
    "smolbuild.build.steps", "smolbuild.core.process", "smolbuild.guest.compile",
    "smolbuild.machine.base", "smolbuild.machine.qemu", "smolbuild.registry.client",
    "smolbuild.registry.session", "smolbuild.source.base_disk", "smolbuild.source.debian",
    "smolbuild.source.ext4", "smolbuild.source.kernel_package", "smolbuild.source.layers",
    "smolbuild.trust",
)  # fmt: skip
"""Loaded by nothing that a plan needs. Who adds one to the path of an unchanged build makes every
build wait for it: import it in the function that uses it (see docs/speed.md)."""

WATCHED = """
import json, sys
started = []
def audit(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system"):
        started.append(event)
sys.addaudithook(audit)
from smolbuild.cli.main import run
status = run(sys.argv[1:])
print(json.dumps({"status": status, "started": started, "modules": sorted(sys.modules)}))
"""


def watch(smolbuild, project: Path, *arguments: str) -> tuple[dict, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        cwd=project,  # click loads difflib for an option with one dash and a value, as -C is
        env=smolbuild.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - began


@pytest.mark.parametrize("command", [("build",), ("plan", "--json"), ("--version",)])
def test_nothing_heavy_is_loaded_and_nothing_is_started(smolbuild, project, built, command):
    del built
    watch(smolbuild, project, *command)  # gives the default name, which is a change of the store
    seen, seconds = watch(smolbuild, project, *command)
    assert seen["status"] == 0
    assert seen["started"] == []
    loaded = [
        name
        for name in seen["modules"]
        if any(name == h or name.startswith(f"{h}.") for h in HEAVY)
    ]
    assert loaded == []
    assert seconds < 5  # on a machine of any speed: less than one process it must not start


def test_leftovers_of_writers_are_looked_for_once_an_hour(fresh_home, monkeypatch):
    monkeypatch.setenv("SMOLBUILD_HOME", str(fresh_home.root))
    place = command_home()
    left = place.materialised / ".tmp-left"
    left.write_bytes(b"half")
    long_ago = time.time() - 25 * 3600
    os.utime(left, (long_ago, long_ago))
    command_home()
    assert left.exists()
    stamp = place.locks / "last-sweep"
    os.utime(stamp, (long_ago, long_ago))
    command_home()
    assert not left.exists()
    assert time.time() - stamp.stat().st_mtime < 3600
