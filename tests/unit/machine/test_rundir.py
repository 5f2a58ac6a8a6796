import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smolbuild.core.files import file_lock
from smolbuild.core.home import Home
from smolbuild.machine.rundir import RunDirectory, sweep

OWNER = """
import sys
from pathlib import Path
from smolbuild.core.home import Home
from smolbuild.machine.rundir import RunDirectory
made = RunDirectory.create(Home(Path(sys.argv[1])))
if len(sys.argv) > 2:
    made.record_process(int(sys.argv[2]))
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def owner(home):
    """Give a function that starts a process which owns a directory, and returns both."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(home.root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, home.run / Path(process.stdout.readline().strip()).name

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_directory_lives_as_long_as_its_owner(home, owner):
    process, path = owner()
    assert path.stat().st_mode & 0o777 == 0o700
    assert sweep(home) == 0
    assert path.is_dir()
    process.kill()
    process.wait()
    assert sweep(home) == 1
    assert not path.exists()
    assert sweep(home) == 0


def test_our_own_directory_is_not_swept_and_goes_once(home):
    made = RunDirectory.create(home)
    assert sweep(home) == 0
    made.remove()
    made.remove()
    assert list(home.run.iterdir()) == []


def test_removing_twice_closes_nobody_elses_file(home):
    made = RunDirectory.create(home)
    made.remove()
    reader, writer = os.pipe()  # takes the number that was free
    made.remove()
    os.fstat(reader)
    os.fstat(writer)
    os.close(reader)
    os.close(writer)


def test_a_directory_in_the_making_is_left_alone(home):
    young = home.run / "a1b2c3d4e5f6"
    with file_lock(home.locks / "making-run-directory", timeout=1, what="run", shared=True):
        young.mkdir()
        assert sweep(home) == 0
        other = RunDirectory.create(home)  # makers do not wait for one another
        other.remove()
        assert young.is_dir()
    assert sweep(home) == 1  # whoever was making it is gone


def test_makers_and_sweeps_at_once_lose_nothing(home):
    def make(_):
        made = RunDirectory.create(home)
        held = (made.path / "owner").exists()
        made.remove()
        return held

    with ThreadPoolExecutor(4) as pool:
        made = pool.map(make, range(200))
        for _ in range(200):
            sweep(home)
        assert all(made)
    assert list(home.run.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("matches", [True, False])
def test_only_the_recorded_process_is_killed(home, owner, matches):
    process, path = owner()
    name = str(path) if matches else "something else"
    script = "import sys; print(flush=True); sys.stdin.read()"
    left = subprocess.Popen([sys.executable, "-c", script, name],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        left.stdout.readline()  # a process that was only just started has no command line yet
        start = Path(f"/proc/{left.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (path / "process.json").write_text(json.dumps({"pid": left.pid, "start": start}))
        process.kill()
        process.wait()
        assert sweep(home) == 1
        if matches:
            assert left.wait(timeout=10) == -9
        else:
            assert left.poll() is None
    finally:
        left.kill()
        left.communicate()


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", '{"pid": "x", "start": "1"}', '{"pid": 1, "start": "1"}',
               '{"pid": -1, "start": "1"}', '{"pid": 99999999, "start": "1"}']
)  # fmt: skip
def test_a_damaged_record_harms_nobody(home, owner, record):
    process, path = owner()
    (path / "process.json").write_text(record)
    process.kill()
    process.wait()
    assert sweep(home) == 1
