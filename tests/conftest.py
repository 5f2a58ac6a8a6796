"""What all tests share: state of their own, downloads kept between runs, and nothing left running.

``SMOLBUILD_TEST_CACHE`` names the directory for what is costly to get and safe to share (kernels,
Debian packages, the compiled agent); without it, one in the user's cache is used. Everything else
is made anew by each run. Tests marked ``vm`` boot real guests and run after all others.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smolbuild.core.files import file_lock, private_directory, remove_tree, try_lock
from smolbuild.core.home import Home

if TYPE_CHECKING:
    from testing_engine import TestingEngine

SHARED_CACHES = ("agent", "debs", "kernel")
"""Parts of ``Home.cache`` that hold only what was fetched or compiled, filed under its digest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/vm, and let everything that boots a machine run last."""
    for item in items:
        if "vm" in item.path.relative_to(Path(__file__).parent).parts[:-1]:
            item.add_marker(pytest.mark.vm)
    items.sort(key=lambda item: item.get_closest_marker("vm") is not None)


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """Give the directory that outlives this run."""
    named = os.environ.get("SMOLBUILD_TEST_CACHE")
    if named:
        return private_directory(Path(named).absolute())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return private_directory(base / "smolbuild-tests")


@pytest.fixture(scope="session")
def homes(test_cache: Path) -> Iterator[Path]:
    """Give the directory for this run's homes; at the end it goes, and nothing may still use it.

    It is on the file system of the shared cache, and short: socket paths end at 108 bytes.
    """
    parent = private_directory(test_cache / "runs")
    with contextlib.ExitStack() as stack:
        with file_lock(parent / "lock", timeout=60, what="the directory of test runs"):
            _remove_abandoned(parent)
            directory = Path(tempfile.mkdtemp(prefix="r", dir=parent))
            assert stack.enter_context(try_lock(directory / "lock"))
        yield directory
        left = _processes_using(directory, patience=5.0)
    remove_tree(directory)
    assert not left, "processes outlived the tests that started them:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def home(homes: Path, test_cache: Path) -> Home:
    """Give the one home that tests of this run share; they must not mind what else is in it."""
    return _new_home(homes / "home", test_cache)


@pytest.fixture
def fresh_home(homes: Path, test_cache: Path) -> Iterator[Home]:
    """Give an empty home for one test: no artifacts, no keys, no step cache."""
    made = _new_home(Path(tempfile.mkdtemp(prefix="h", dir=homes)), test_cache)
    yield made
    remove_tree(made.root)


@pytest.fixture(scope="session")
def docker_engine() -> Iterator["TestingEngine"]:
    """Give a real Docker engine; tests use image names of their own."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a Docker engine")
    from testing_engine import testing_engine

    with testing_engine() as engine:
        yield engine


@pytest.fixture(scope="session", autouse=True)
def _own_home(homes: Path) -> Iterator[None]:
    """Keep every test, and every command a test starts, out of the user's own state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOLBUILD_HOME", str(homes / "home"))
        yield


def _new_home(root: Path, test_cache: Path) -> Home:
    made = Home(private_directory(root))
    for name in SHARED_CACHES:
        (made.cache / name).symlink_to(private_directory(test_cache / name))
    return made


def _remove_abandoned(parent: Path) -> None:
    """Remove the homes of runs that were killed: nobody holds their lock."""
    for lock in parent.glob("*/lock"):
        with try_lock(lock) as free:
            if free:
                shutil.rmtree(lock.parent, ignore_errors=True)


def _processes_using(directory: Path, *, patience: float) -> list[str]:
    """Return the command lines that name ``directory``, after giving them ``patience`` to end."""
    deadline = time.monotonic() + patience
    while True:
        found = [line for line in _command_lines() if str(directory) in line]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _command_lines() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            raw = (process / "cmdline").read_bytes()
            yield f"{process.name}: " + raw.replace(b"\0", b" ").decode(errors="replace")
