import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.machine.memory import save_sparse

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


def test_nothing_is_overwritten(tmp_path):
    for name in ("source", "target"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FileExistsError):
        save_sparse(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"x"
