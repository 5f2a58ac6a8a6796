import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.machine.memory import copy_sparse, save_sparse

PAGE = 4096


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 20), st.booleans()), max_size=10),
    st.integers(0, PAGE),
)
def test_content_is_kept_and_zeros_take_no_space(tmp_path_factory, runs, tail):
    directory = tmp_path_factory.mktemp("memory")
    source, target = directory / "source", directory / "target"
    size = 800 * PAGE + tail
    content = bytearray(size)
    with source.open("wb") as file:
        file.truncate(size)
        for page, count, zeros in runs:
            data = (b"\0" if zeros else b"\x55") * (count * PAGE)
            file.seek(page * PAGE)
            file.write(data)
            content[page * PAGE : (page + count) * PAGE] = data
    written = save_sparse(source, target)
    assert target.read_bytes() == content
    pages = [content[at : at + PAGE] for at in range(0, size, PAGE)]
    assert written == sum(len(page) for page in pages if any(page))
    assert target.stat().st_blocks * 512 <= written + 64 * PAGE
    again = directory / "again"
    copy_sparse(target, again)
    assert again.read_bytes() == content
    assert again.stat().st_blocks <= target.stat().st_blocks


def test_nothing_is_overwritten(tmp_path):
    for name in ("source", "target"):
        (tmp_path / name).write_bytes(b"x")
    for write in (save_sparse, copy_sparse):
        with pytest.raises(FileExistsError):
            write(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"x"


def test_a_file_system_that_copies_nothing_by_itself_is_no_obstacle(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refused)
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(9 << 20)
        file.seek(3 << 20)
        file.write(b"\x55" * (3 << 20))
    copy_sparse(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks == source.stat().st_blocks
