import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from smolbuild.core.errors import BusyError, HostError, UsageError
from smolbuild.core.files import (
    atomic_file,
    file_lock,
    private_directory,
    remove_tree,
    require_space,
    sweep_temporaries,
    try_lock,
    write_atomic,
)


def test_what_is_no_file_is_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(UsageError, match="not a file"):
            write_atomic(path, b"new")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_write_atomic_replaces_and_sets_the_mode(tmp_path):
    target = tmp_path / "x"
    target.write_text("old")
    write_atomic(target, b"new", mode=0o640)
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_an_error_while_writing_leaves_the_old_file_alone(tmp_path):
    target = tmp_path / "x"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(target) as stream:
        stream.write(b"half" * (1 // 0))
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


KILLED = """
import os, signal, sys
from pathlib import Path
from smolbuild.core.files import atomic_file
with atomic_file(Path(sys.argv[1])) as stream:
    stream.write(b"half" * 100000)
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_while_writing_leaves_the_old_file(tmp_path):
    target = tmp_path / "x"
    target.write_text("old")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False, timeout=30)
    assert ended.returncode == -signal.SIGKILL
    assert target.read_text() == "old"


def test_a_lock_is_exclusive_and_says_what_it_protects(tmp_path):
    path = tmp_path / "lock"
    with file_lock(path, timeout=1, what="the thing"):
        with try_lock(path) as held:
            assert not held
        with (
            pytest.raises(BusyError, match="the thing is held"),
            file_lock(path, timeout=0.05, what="the thing", interval=0.01),
        ):
            pass
    with try_lock(path) as held:
        assert held


def test_shared_locks_share(tmp_path):
    path = tmp_path / "lock"
    with try_lock(path, shared=True) as first, try_lock(path, shared=True) as second:
        assert first
        assert second
        with try_lock(path) as third:
            assert not third


def test_require_space_names_the_bytes(tmp_path):
    require_space(tmp_path / "not" / "there", 1, what="x")
    with pytest.raises(HostError, match=r"needs 1,000,000,000,000,000,000 bytes"):
        require_space(tmp_path, 10**18, what="x")


def test_private_directory_and_remove_tree(tmp_path):
    made = private_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(made)
    remove_tree(link)
    assert made.exists()
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert not Path(tmp_path / "a").exists()


def test_only_old_temporaries_are_swept(tmp_path):
    for name in (".tmp-old", ".tmp-young", "kept"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".tmp-directory").mkdir()
    (tmp_path / ".tmp-directory" / "file").write_text("x")
    for name in (".tmp-old", ".tmp-directory", "kept"):
        os.utime(tmp_path / name, (1, 1))
    assert sweep_temporaries(tmp_path, older_than=3600) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".tmp-young", "kept"]
    assert sweep_temporaries(tmp_path / "missing", older_than=0) == 0
