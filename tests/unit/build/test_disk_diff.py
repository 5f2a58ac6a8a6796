"""How the files of two disks differ, and what is not read because it must be equal."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_trees import trees

from smolbuild.build.disk_diff import (
    FileChange,
    compare_files,
    differing_ranges,
    summarise,
)
from smolbuild.core.digest import digest_bytes
from smolbuild.model.artifact import DELTA_BLOCK, Chunk, DiskDelta, DiskStreams, Stream
from smolbuild.source.content import FileBacking, bytes_content
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.ext4_reader import Ext4, Node
from smolbuild.source.tree import Kind, Tree
from smolbuild.source.tree import Node as TreeNode

SIZE = 16 << 20
EVERYWHERE = [(0, SIZE)]

Opened = tuple[Ext4, Mapping[bytes, Node]]


@contextlib.contextmanager
def opened(path: Path, reads: list[tuple[int, int]] | None = None) -> Iterator[Opened]:
    with FileBacking(path) as backing:

        def read(offset: int, length: int) -> bytes:
            if reads is not None:
                reads.append((offset, offset + length))
            return backing.read(offset, length)

        system = Ext4(read, backing.size)
        yield system, {node.path: node for node in system.walk()}


def changes(tmp_path: Path, old: Tree, new: Tree) -> list[str]:
    for name, tree in (("old", old), ("new", new)):
        write_ext4(tree, tmp_path / name, SIZE)
    with opened(tmp_path / "old") as before, opened(tmp_path / "new") as after:
        return [str(change) for change in compare_files(before, after, EVERYWHERE)]


def tree_of(**files: bytes) -> Tree:
    tree = Tree()
    for name, content in files.items():
        tree.put(name.replace("__", "/").encode(), content)
    return tree


def test_every_kind_of_change_is_named(tmp_path: Path) -> None:
    old = tree_of(same=b"1", content=b"1", grows=b"1", mode=b"1", owner=b"1", kind=b"1", gone=b"1")
    new = tree_of(same=b"1", content=b"2", grows=b"12", mode=b"1", owner=b"1", came=b"1")
    for tree, target in ((old, b"a"), (new, b"b")):
        tree.root.children[b"link"] = TreeNode(kind=Kind.SYMLINK, mode=0o777, target=target)
    new.root.children[b"kind"] = TreeNode(kind=Kind.DIRECTORY, mode=0o755)
    new.find(b"mode").mode = 0o4755
    new.find(b"owner").uid = 7
    new.find(b"same").mtime = 77
    mode = f"{old.find(b'mode').mode:04o}"
    assert changes(tmp_path, old, new) == [
        "+ /came",
        "~ /content: content",
        "- /gone",
        "~ /grows: content (1 -> 2 bytes)",
        "~ /kind: file -> directory",
        "~ /link: target a -> b",
        f"~ /mode: mode {mode} -> 4755",
        "~ /owner: owner 0:0 -> 7:0",
    ]


@given(trees(), st.data())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_one_changed_file_is_the_one_change(tmp_path: Path, tree: Tree, data) -> None:
    files = sorted({id(n): p for p, n in tree.walk() if n.kind is Kind.FILE}.values())
    assert changes(tmp_path, tree, tree) == []
    if not files:
        return
    path = data.draw(st.sampled_from(files))
    other = copy.deepcopy(tree)
    node = other.find(path)
    content = node.content.read(0, node.content.size)
    node.content = bytes_content(content + b"x")
    shared = {p for p, n in other.walk() if n is node}  # hard links of one file
    found = changes(tmp_path, tree, other)
    assert len(found) == len(shared)
    assert all(": content (" in line for line in found)


def test_what_must_be_equal_is_not_read_and_what_may_differ_is(tmp_path: Path) -> None:
    tree = tree_of(first=b"a" * 500_000, second=b"b" * 500_000)
    write_ext4(tree, tmp_path / "old", SIZE)
    data = bytearray((tmp_path / "old").read_bytes())
    place = data.index(b"b" * 4096)
    data[place : place + 8] = b"otherwis"
    (tmp_path / "new").write_bytes(data)
    reads: list[tuple[int, int]] = []
    first = data.index(b"a" * 4096)
    with opened(tmp_path / "old") as before, opened(tmp_path / "new", reads) as after:
        found = compare_files(before, after, [(place, place + DELTA_BLOCK)])
    assert found == (FileChange(path="/second", kind="changed", what=("content",)),)
    assert not any(start < first + 500_000 and first < end for start, end in reads)
    assert any(start <= place < end for start, end in reads)


def stream(*contents: bytes) -> Stream:
    chunks = tuple(
        Chunk(layer=0, length=len(each), sha256=digest_bytes(each)) if each.strip(b"\0")
        else Chunk(layer=None, length=len(each))
        for each in contents
    )  # fmt: skip
    return Stream(size=sum(map(len, contents)), chunk_size=4096, chunks=chunks)


def delta(content: bytes, *blocks: int, zeros: tuple[tuple[int, int], ...] = ()) -> DiskDelta:
    return DiskDelta(
        step="x",
        block_size=DELTA_BLOCK,
        blocks=tuple((block, 1) for block in blocks),
        zeros=zeros,
        data=stream(content),
    )


BASE = stream(b"a" * 4096, b"\0" * 4096, b"c" * 4096)


@pytest.mark.parametrize(
    ("old", "new", "ranges"),
    [
        (DiskStreams(base=BASE, deltas=()), DiskStreams(base=BASE, deltas=()), []),
        (
            DiskStreams(base=BASE, deltas=(delta(b"1", 3), delta(b"2", 9))),
            DiskStreams(base=BASE, deltas=(delta(b"1", 3), delta(b"3", 5, zeros=((6, 2),)))),
            [(5 * DELTA_BLOCK, 8 * DELTA_BLOCK), (9 * DELTA_BLOCK, 10 * DELTA_BLOCK)],
        ),
        (
            DiskStreams(base=BASE, deltas=(delta(b"1", 3),)),
            DiskStreams(base=BASE, deltas=(delta(b"2", 3),)),
            [(3 * DELTA_BLOCK, 4 * DELTA_BLOCK)],
        ),
        (
            DiskStreams(base=BASE, deltas=()),
            DiskStreams(base=stream(b"a" * 4096, b"b" * 4096, b"c" * 4096), deltas=()),
            [(4096, 8192)],
        ),
        (
            DiskStreams(base=BASE, deltas=()),
            DiskStreams(base=stream(b"a" * 4096), deltas=()),
            [(4096, 12288)],
        ),
    ],
)
def test_where_two_disks_may_differ(
    old: DiskStreams, new: DiskStreams, ranges: list[tuple[int, int]]
) -> None:
    assert differing_ranges(old, new) == differing_ranges(new, old) == ranges


def added(*paths: str) -> list[FileChange]:
    return [FileChange(path=path, kind="added") for path in paths]


def test_few_changes_are_each_said() -> None:
    assert [str(group) for group in summarise(added("/a", "/b/c"), 10)] == ["+ /a", "+ /b/c"]


def test_many_changes_below_a_directory_are_counted() -> None:
    many = added(*(f"/usr/lib/{name}" for name in range(100)), "/etc/hosts")
    many.append(FileChange(path="/usr", kind="changed", what=("mode 0755 -> 0700",)))
    assert [str(group) for group in summarise(many, 10)] == [
        "+ /etc/hosts",
        "~ /usr: mode 0755 -> 0700",
        "  /usr/lib: 100 added",
    ]


def test_caches_and_logs_are_counted_even_where_there_is_room() -> None:
    found = summarise(added("/var/log/a", "/var/log/b", "/var/lib/x"), 10)
    assert [str(group) for group in found] == ["+ /var/lib/x", "  /var/log: 2 added"]


paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda p: "/" + "/".join(p))


@given(st.lists(paths, unique=True, max_size=40), st.integers(1, 20))
def test_a_summary_counts_everything_and_is_short(found: list[str], limit: int) -> None:
    groups = summarise(added(*found), limit)
    assert sum(group.added for group in groups) == len(found)
    assert len(groups) <= max(limit, 1)
    if len(found) <= 3 and limit == 20:
        assert all(group.only is not None for group in groups)


def test_content_that_stands_in_the_journal_or_nowhere_is_read(tmp_path: Path) -> None:
    write_ext4(tree_of(empty=b"", full=b"x" * 9000), tmp_path / "disk", SIZE)
    with opened(tmp_path / "disk") as (system, nodes):
        assert system.stands_on_disk(system.content_of(nodes[b"/full"]))
        assert system.stands_on_disk(system.content_of(nodes[b"/empty"]))
        assert not system.stands_on_disk(bytes_content(b"x"))
