import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from smolbuild.core.errors import HostError
from smolbuild.core.process import die_with_parent, kill_group, run, spawn
from smolbuild.core.programs import find_program


def test_run_gives_status_and_both_outputs():
    done = run(["sh", "-c", "cat; echo err >&2; exit 3"], timeout=10, stdin=b"in")
    assert (done.status, done.stdout, done.stderr) == (3, b"in", b"err\n")


def test_a_missing_program_names_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError) as caught:
        find_program("mmdebstrap")
    assert "apt-get install mmdebstrap" in caught.value.hint


def test_the_deadline_kills_the_whole_group(tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(HostError, match="did not end within"):
        run(["sh", "-c", f"sleep 60 & echo $! > {note}; wait"], timeout=0.5)
    assert _await_end(int(note.read_text()))


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def _await_end(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _alive(pid)


PARENT = """
import sys, time
from smolbuild.core.process import spawn
child = spawn(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent_after_kill_9():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)  # whether the child has asked for the signal yet or not
    parent.wait()
    parent.stdout.close()
    assert _await_end(pid)


@pytest.mark.parametrize(("parent", "started"), [(os.getpid(), True), (2**22 + 1, False)])
def test_a_child_whose_parent_is_gone_is_not_started(tmp_path, parent, started):
    command = [*die_with_parent(parent), "/bin/sh", "-c", 'echo "$0" > "$1"', "a b", tmp_path / "x"]
    assert subprocess.run(command, timeout=10, check=False).returncode == (0 if started else 1)
    assert (tmp_path / "x").exists() == started


def test_a_child_outlives_the_thread_that_started_it():
    children = []
    thread = threading.Thread(target=lambda: children.append(spawn(["sleep", "60"])))
    thread.start()
    thread.join()
    (child,) = children
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
    finally:
        kill_group(child)
    assert child.returncode == -signal.SIGKILL
    kill_group(child)


def test_descriptors_are_passed_only_when_asked():
    read, write = os.pipe()
    try:
        kept = run(["sh", "-c", f"test -e /dev/fd/{write}"], timeout=10)
        assert kept.status != 0
        child = spawn(["sh", "-c", f"echo x > /dev/fd/{write}"], pass_fds=[write])
        assert child.wait(10) == 0
        assert os.read(read, 2) == b"x\n"
    finally:
        os.close(read)
        os.close(write)
