"""The tar reader agrees with the standard library on good archives and survives bad ones."""

import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_trees import directory, entry, make_tar, region, symlink

from smolbuild.core.errors import BuildError
from smolbuild.source.tar import read_tar

_FORMATS = st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
_NAMES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=150
).filter(lambda name: not name.endswith("/"))


@st.composite
def _entries(draw):
    kind = draw(st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]))
    data = draw(st.binary(max_size=1200)) if kind == tarfile.REGTYPE else None
    return entry(
        draw(_NAMES),
        data,
        type=kind,
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(st.integers(0, 2**32 - 2)),
        gid=draw(st.integers(0, 2**32 - 2)),
        mtime=draw(st.integers(0, 2**40)),
        linkname=draw(_NAMES) if kind == tarfile.SYMTYPE else "",
    )


@given(st.lists(_entries(), max_size=6), _FORMATS)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read(entries, form):
    found = list(read_tar(region(make_tar(entries, form))))
    assert len(found) == len(entries)
    for (info, data), got in zip(entries, found, strict=True):
        assert got.name.rstrip(b"/") == info.name.encode()
        assert (got.mode, got.uid, got.gid) == (info.mode, info.uid, info.gid)
        assert got.mtime == info.mtime
        assert got.target == info.linkname.encode()
        assert got.content.read(0, got.content.size) == data


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_mutation_brings_a_foreign_error(data):
    form = data.draw(_FORMATS)
    archive = bytearray(
        make_tar(
            [
                directory("a"),
                entry("a/" + "n" * 120, b"hello" * 200, uid=2**31),
                symlink("a/link", "t" * 120),
                entry("x", b"y", pax_headers={"SCHILY.xattr.user.k": "v"}),
            ],
            form,
        )
    )
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(archive) - 1))
        archive[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del archive[data.draw(st.integers(0, len(archive))) :]
    if data.draw(st.booleans()):  # give every header a right checksum, to get behind that check
        for start in range(0, len(archive) - 511, 512):
            archive[start + 148 : start + 156] = b" " * 8
            total = sum(archive[start : start + 512])
            archive[start + 148 : start + 156] = b"%06o\0 " % total
    try:
        for got in read_tar(region(bytes(archive))):
            got.content.read(0, min(got.content.size, 1 << 16))
    except BuildError:
        pass


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=posix", "--sparse-version=0.0"],
        ["--format=posix", "--sparse-version=0.1"],
        ["--format=posix", "--sparse-version=1.0"],
    ],
)
def test_sparse_files_of_every_format(options, tmp_path):
    path = tmp_path / "holes"
    with path.open("wb") as file:
        for index in range(60):  # more runs than one header holds
            file.seek(index * 3 * 4096)
            file.write(bytes([index + 1]) * 4096)
        file.truncate(60 * 3 * 4096 + 77)
    (tmp_path / "after").write_bytes(b"next")
    archive = tmp_path / "a.tar"
    subprocess.run(
        ["tar", *options, "-S", "-cf", archive, "-C", tmp_path, "holes", "after"], check=True
    )
    found = list(read_tar(region(archive.read_bytes())))
    assert [got.name for got in found] == [b"holes", b"after"]
    assert found[0].content.read(0, found[0].content.size) == path.read_bytes()
    assert len(found[0].content.segments) >= 60, "the archive was not sparse"
    assert found[1].content.read(0, 4) == b"next"


def test_extended_attributes_with_binary_values():
    value = b"\1\0\0\2\n=\xff"
    info, data = entry("f", b"")
    info.pax_headers = {
        "SCHILY.xattr.security.capability": value.decode("utf-8", "surrogateescape")
    }
    (got,) = read_tar(region(make_tar([(info, data)])))
    assert got.xattrs == {b"security.capability": value}


def _header(**changes: bytes) -> bytes:
    """A plain header of an empty file ``f`` with some fields replaced and a right checksum."""
    fields = {"name": (0, 100), "size": (124, 136), "type": (156, 157), "uid": (108, 116)}
    header = bytearray(make_tar([entry("f", b"")], tarfile.USTAR_FORMAT)[:512])
    for name, value in changes.items():
        start, end = fields[name]
        header[start:end] = value.ljust(end - start, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (_header(size=b"\xff" * 12), "impossible size -1"),
        (_header(size=b"\x80" + b"\x7f" * 11), "impossible size"),
        (_header(size=b"77777777777"), "cut short"),
        (_header(size=b"12x"), "not a number"),
        (_header(uid=b"\xff" * 8), "impossible uid -1"),
        (_header(type=b"Z"), "unknown entry type"),
        (_header(type=b"x", size=b"10"), "cut short"),
        (_header(type=b"L", size=b"40000000000") + bytes(1024), "cut short"),
        (_header()[:300], "cut short"),
        (b"\1" * 512, "checksum"),
        (bytes(512) + _header(), "lone zero block"),
        (_header(type=b"L", size=b"2") + b"ab".ljust(512, b"\0"), "ends after an extended header"),
    ],
)
def test_malformed_archives_are_refused_with_a_reason(archive, message):
    with pytest.raises(BuildError, match=message):
        list(read_tar(region(archive)))


@pytest.mark.parametrize(
    "record", [b"x", b"4 a=\n", b"999 a=b\n", b"6 a=bc", b"7 abcd\n", b"-1 a=b\n"]
)
def test_malformed_pax_records_are_refused(record):
    size = b"%o" % len(record)
    archive = _header(type=b"x", size=size) + record.ljust(512, b"\0") + _header()
    with pytest.raises(BuildError, match="pax record"):
        list(read_tar(region(archive)))


def test_deeply_nested_extended_headers_do_not_recurse():
    chain = (_header(type=b"L", size=b"2") + b"n\0".ljust(512, b"\0")) * 5000
    (got,) = read_tar(region(chain + _header()))
    assert got.name == b"n"
