"""The ext4 writer: clean for e2fsck, read back by debugfs, and the same bytes every time."""

import os
import random
import re
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_trees import debugfs, fsck, nodes, trees

from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import BuildError
from smolbuild.source.content import BytesBacking, Content, Segment, bytes_content
from smolbuild.source.disk import digest_disk
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.tree import Kind, Node, Tree

MIB = 1 << 20
SIZE = 16 * MIB


def _file(data: bytes, **facts) -> Node:
    return Node(kind=Kind.FILE, mode=0o644, content=bytes_content(data), **facts)


def _stat(image: Path, name: str) -> str:
    return debugfs(image, f"stat {name}")


@given(trees())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_tree_is_clean_and_holds_what_it_should(tmp_path, tree):
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert fsck(image) == ""
    # debugfs cannot quote every name; e2fsck has seen those
    checked = [(p, n) for p, n in tree.walk() if re.fullmatch(rb"[\w/.-]*", p)]
    commands = [f"stat /{os.fsdecode(path)}" for path, _ in checked]
    for number, (path, node) in enumerate(checked):
        if node.kind is Kind.FILE:
            commands.append(f"dump /{os.fsdecode(path)} {tmp_path / str(number)}")
    shown = re.split(r"(?m)^(?=Inode: )", debugfs(image, *commands))[1:]
    assert len(shown) == len(checked)
    numbers = {}
    for number, (_, node) in enumerate(checked):
        text = shown[number]
        assert re.search(rf"Mode: +0*{node.mode:o}\b", text), text
        found = re.search(r"User: +(-?\d+) +Group: +(-?\d+)", text)
        owners = int(found[1]) % 2**32, int(found[2]) % 2**32
        assert owners == (node.uid, node.gid)
        inode = re.search(r"Inode: (\d+)", text)[1]
        assert numbers.setdefault(id(node), inode) == inode, "a hard link became a copy"
        if node.kind is Kind.FILE:
            assert (tmp_path / str(number)).read_bytes() == node.content.read(0, node.content.size)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=8), nodes()), max_size=8))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_order_of_insertion_does_not_matter(tmp_path, entries):
    named = {
        name.replace(b"/", b"_").replace(b"\0", b"0"): node
        for name, node in entries
        if name not in (b".", b"..")
    }
    images = []
    for number, reverse in enumerate((False, True)):
        tree = Tree()
        for name in sorted(named, reverse=reverse):
            tree.root.children[name] = named[name]
        images.append(tmp_path / f"{number}.img")
        write_ext4(tree, images[-1], SIZE)
    assert images[0].read_bytes() == images[1].read_bytes()


def _mixed_tree() -> Tree:
    rng = random.Random(7)
    tree = Tree()
    for index in range(300):
        tree.put(f"d{index % 7}/e{index % 3}/f{index}".encode(), rng.randbytes(index * 37))
    tree.root.children[b"h"] = tree.find(b"d0/e0/f0")
    return tree


def test_the_bytes_never_change(tmp_path, monkeypatch):
    first = write_ext4(_mixed_tree(), tmp_path / "a", 64 * MIB)
    previous = os.umask(0o077)
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        second = write_ext4(_mixed_tree(), tmp_path / "b", 64 * MIB)
    finally:
        os.umask(previous)
        monkeypatch.undo()
        time.tzset()
    assert first.digest == second.digest
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    # A change of this value means that every base disk changes: raise EXT4_VERSION with it.
    assert first.digest == PINNED


PINNED = "sha256:2243e1478273c24735092e6d2b19e9049c71287af9e0b4b8b51751b18fd5f724"


def test_a_large_sparse_disk_is_quick_and_small(tmp_path):
    image = tmp_path / "root.img"
    disk = write_ext4(_mixed_tree(), image, 20 << 30)
    assert disk.size == image.stat().st_size == 20 << 30
    assert image.stat().st_blocks * 512 < 32 * MIB
    assert fsck(image) == ""


@pytest.mark.parametrize("blocks", [3, 4, 5, 339, 340, 341, 1361])
def test_fragmented_files_need_extent_trees(tmp_path, blocks):
    """Every second block is a hole, so each data block is an extent of its own."""
    segments = tuple(Segment(2 * i * 4096, i * 4096, 4096) for i in range(blocks))
    data = b"".join(struct.pack("<I", i + 1) * 1024 for i in range(blocks))
    tree = Tree()
    size = 2 * blocks * 4096 + 123
    tree.root.children[b"holes"] = Node(
        kind=Kind.FILE, mode=0o600, content=Content(size, BytesBacking(data), segments)
    )
    image = tmp_path / "root.img"
    write_ext4(tree, image, 32 * MIB)
    assert fsck(image) == ""
    debugfs(image, f"dump /holes {tmp_path / 'out'}")
    expected = b"".join(data[i : i + 4096] + bytes(4096) for i in range(0, len(data), 4096))
    assert (tmp_path / "out").read_bytes() == expected + bytes(123)
    used = int(re.search(r"Blockcount: (\d+)", _stat(image, "/holes"))[1])
    assert used * 512 <= (blocks + 6) * 4096, "holes took blocks"


def test_a_file_of_zeros_takes_no_blocks(tmp_path):
    tree = Tree()
    tree.root.children[b"zeros"] = _file(bytes(3 * MIB))
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert "Blockcount: 0" in _stat(image, "/zeros")
    assert fsck(image) == ""


def test_a_file_longer_than_a_group_goes_around_what_is_in_the_way(tmp_path):
    """More than 128 MiB: the backup superblock of group 1 lies in the middle."""
    size = 150 * MIB
    tree = Tree()
    block = bytes(range(256)) * 16
    backing = _Repeated(block)
    tree.root.children[b"big"] = Node(
        kind=Kind.FILE, content=Content(size, backing, (Segment(0, 0, size),))
    )
    image = tmp_path / "root.img"
    write_ext4(tree, image, 400 * MIB)
    assert fsck(image) == ""
    debugfs(image, f"dump /big {tmp_path / 'out'}")
    assert (tmp_path / "out").stat().st_size == size
    with (tmp_path / "out").open("rb") as out:
        assert all(chunk == block * 256 for chunk in iter(lambda: out.read(MIB), b""))


class _Repeated:
    def __init__(self, block: bytes) -> None:
        self._block = block

    def read(self, offset: int, length: int) -> bytes:
        skip = offset % len(self._block)
        return (self._block * (length // len(self._block) + 2))[skip : skip + length]


def test_a_directory_of_many_names(tmp_path):
    tree = Tree()
    for index in range(3000):
        tree.put(f"big/a-rather-long-name-{index:06}".encode(), b"")
    image = tmp_path / "root.img"
    write_ext4(tree, image, 64 * MIB)
    assert fsck(image) == ""
    assert debugfs(image, "ls -p /big").count("a-rather-long-name-") == 3000


def test_links_of_directories_beyond_what_can_be_counted(tmp_path):
    tree = Tree()
    for index in range(65100):
        tree.root.children[b"%d" % index] = Node(kind=Kind.DIRECTORY)
    image = tmp_path / "root.img"
    write_ext4(tree, image, 1 << 30)
    assert fsck(image) == ""


def test_too_many_hard_links_are_refused(tmp_path):
    tree = Tree()
    node = _file(b"x")
    for index in range(65001):
        tree.root.children[b"%d" % index] = node
    with pytest.raises(BuildError, match="65,001 hard links"):
        write_ext4(tree, tmp_path / "root.img", 64 * MIB)
    assert list(tmp_path.iterdir()) == [], "a temporary file was left"


@pytest.mark.parametrize("device", [(1, 3), (8, 255), (259, 1), (4095, 2**20 - 1)])
def test_devices(tmp_path, device):
    tree = Tree()
    tree.root.children[b"dev"] = Node(kind=Kind.BLOCK, device=device)
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    shown = re.search(r"Device major/minor number: (\d+):(\d+)", _stat(image, "/dev"))
    assert (int(shown[1]), int(shown[2])) == device


@pytest.mark.parametrize("length", [1, 59, 60, 4095])
def test_symbolic_links(tmp_path, length):
    tree = Tree()
    target = (b"t/" * 2048)[:length]
    tree.root.children[b"l"] = Node(kind=Kind.SYMLINK, target=target)
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert fsck(image) == ""
    shown = _stat(image, "/l")
    assert f"Size: {length}" in shown
    assert ("Fast link dest" in shown) == (length < 60)


_CAPABILITY = b"\1\0\0\2\x00\x04\0\0" + bytes(12)


def test_extended_attributes_are_read_back(tmp_path):
    tree = Tree()
    attributes = {
        b"security.capability": _CAPABILITY,
        b"user.small": b"s",
        b"user.large": b"L" * 3000,
        b"user.empty": b"",
    }
    tree.root.children[b"f"] = _file(b"x", xattrs=attributes)
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert fsck(image) == ""
    for name, value in attributes.items():
        out = tmp_path / "value"
        out.unlink(missing_ok=True)
        debugfs(image, f"ea_get -f {out} /f {name.decode()}")
        assert out.read_bytes() == value, name


def test_posix_acls_are_stored_as_ext4_has_them(tmp_path):
    # debugfs shows 0 where system calls have -1: entries without a name of their own
    entries = [(1, 7, 0), (2, 6, 1000), (4, 5, 0), (16, 7, 0), (32, 4, 0)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *item) for item in entries)
    tree = Tree()
    tree.root.children[b"d"] = Node(
        kind=Kind.DIRECTORY,
        xattrs={b"system.posix_acl_access": value, b"system.posix_acl_default": value},
    )
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert fsck(image) == ""
    out = tmp_path / "acl"
    debugfs(image, f"ea_get -f {out} /d system.posix_acl_access")
    assert out.read_bytes() == value


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({b"com.example": b""}, "cannot hold"),
        ({b"user.": b""}, "cannot hold"),
        ({b"user.x": b"x" * 5000}, "do not fit"),
        ({b"system.posix_acl_access": b"junk"}, "malformed"),
    ],
)
def test_attributes_that_ext4_cannot_hold(tmp_path, attributes, message):
    tree = Tree()
    tree.root.children[b"f"] = _file(b"x", xattrs=attributes)
    with pytest.raises(BuildError, match=f"/f: .*{message}"):
        write_ext4(tree, tmp_path / "root.img", SIZE)


def test_a_disk_too_small_names_the_bytes_needed(tmp_path):
    tree = Tree()
    tree.root.children[b"big"] = _file(b"x" * (40 * MIB))
    with pytest.raises(BuildError, match=r"need about ([\d,]+)") as caught:
        write_ext4(tree, tmp_path / "root.img", SIZE)
    needed = int(re.search(r"need about ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert "overlay = 1" in caught.value.hint
    write_ext4(tree, tmp_path / "root.img", needed + MIB)
    assert fsck(tmp_path / "root.img") == ""
    with pytest.raises(BuildError, match="cannot be made"):
        write_ext4(tree, tmp_path / "root.img", MIB)
    with pytest.raises(BuildError, match="cannot be made"):
        write_ext4(tree, tmp_path / "root.img", 1 << 44)


def test_more_files_than_the_usual_number_of_inodes(tmp_path):
    tree = Tree()
    for index in range(3000):
        tree.put(b"d/%d" % index, b"")
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert fsck(image) == ""


def test_lost_and_found_of_the_image_is_used(tmp_path):
    tree = Tree()
    tree.put(b"lost+found/thing", b"x")
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    assert fsck(image) == ""
    assert "Inode: 11 " in _stat(image, "/lost+found")
    assert "Size: 1" in _stat(image, "/lost+found/thing")
    tree.root.children[b"lost+found"] = _file(b"")
    with pytest.raises(BuildError, match="not a directory"):
        write_ext4(tree, image, SIZE)


@pytest.mark.parametrize("groups", [1, 2, 3, 15, 16, 17, 18, 27, 49])
@pytest.mark.parametrize("rest", [0, 4096, 63 * 4096, 20000 * 4096])
def test_every_shape_of_disk_is_clean(tmp_path, groups, rest):
    tree = Tree()
    tree.put(b"f", b"x" * 5000)
    image = tmp_path / "root.img"
    write_ext4(tree, image, groups * 128 * MIB + rest + 17)
    assert fsck(image) == ""


def test_digest_of_a_disk_ignores_how_sparse_it_is(tmp_path):
    data = bytes(3 * MIB) + b"x" + bytes(2 * MIB)
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    dense.write_bytes(data)
    with sparse.open("wb") as file:
        file.seek(3 * MIB)
        file.write(b"x")
        file.truncate(len(data))
    assert digest_disk(dense) == digest_disk(sparse)
    with sparse.open("r+b") as file:
        file.truncate(len(data) + 1)
    assert digest_disk(dense) != digest_disk(sparse), "the size is part of it"
    assert digest_disk(dense) != digest_bytes(data)
