import os
import subprocess
import sys
from pathlib import Path

import pytest

from smolbuild.core.files import try_lock
from smolbuild.core.home import Home, open_home


@pytest.fixture
def conftest(request: pytest.FixtureRequest):
    """Give the module under test, whatever pytest calls it."""
    path = request.config.rootpath / "tests" / "conftest.py"
    return request.config.pluginmanager.get_plugin(str(path))


def test_a_test_never_sees_the_users_own_home(home: Home):
    assert open_home(os.environ).root == home.root


def test_fresh_home_is_empty_but_for_shared_downloads(conftest, fresh_home: Home, test_cache: Path):
    assert list(fresh_home.store.iterdir()) == []
    assert list(fresh_home.keys.iterdir()) == []
    shared = {path.name: path.resolve() for path in fresh_home.cache.iterdir()}
    assert shared == {name: test_cache / name for name in conftest.SHARED_CACHES}


def test_a_process_left_in_a_home_is_found(conftest, tmp_path: Path):
    program = "import sys; sys.stdout.write('up\\n'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = conftest._processes_using(tmp_path, patience=0)
        child.communicate(b"", timeout=10)
    assert [line.partition(":")[0] for line in found] == [str(child.pid)]
    assert conftest._processes_using(tmp_path, patience=10) == []


def test_homes_of_killed_runs_are_removed_and_those_of_live_runs_kept(conftest, tmp_path: Path):
    dead, live = tmp_path / "dead", tmp_path / "live"
    for directory in (dead, live):
        directory.mkdir()
        (directory / "lock").touch()
    with try_lock(live / "lock"):
        conftest._remove_abandoned(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["live"]
