"""Layers: whiteouts, links and what a hostile layer may try."""

import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_trees import directory, entry, hardlink, listing, make_tar, region, symlink

from smolbuild.core.errors import BuildError
from smolbuild.source import tree as tree_module
from smolbuild.source.layers import apply_layer
from smolbuild.source.tree import Kind, Tree


def merged(*layers):
    tree = Tree()
    for number, entries in enumerate(layers, 1):
        apply_layer(tree, region(make_tar(entries)), what=f"layer {number}")
    return tree


_LOWER = [
    directory("d"),
    entry("d/old", b"old"),
    directory("d/sub"),
    entry("d/sub/deep", b"deep"),
    entry("f", b"lower"),
]


def test_a_whiteout_hides_only_what_lower_layers_hold():
    assert listing(merged(_LOWER, [entry("d/.wh.old")])) == {
        "d": "directory",
        "d/sub": "directory",
        "d/sub/deep": b"deep",
        "f": b"lower",
    }


@pytest.mark.parametrize("first", [True, False], ids=["marker first", "marker last"])
def test_an_opaque_directory_keeps_what_the_same_layer_adds(first):
    marker, added = [entry("d/.wh..wh..opq")], [entry("d/new", b"new"), entry("d/sub/n", b"n")]
    upper = marker + added if first else added + marker
    assert listing(merged(_LOWER, upper)) == {
        "d": "directory",
        "d/new": b"new",
        "d/sub": "directory",
        "d/sub/n": b"n",
        "f": b"lower",
    }


@pytest.mark.parametrize("first", [True, False], ids=["marker first", "marker last"])
def test_a_whiteout_of_a_name_that_the_same_layer_adds(first):
    marker, added = [entry(".wh.f")], [entry("f", b"upper")]
    upper = marker + added if first else added + marker
    assert listing(merged(_LOWER, upper))["f"] == b"upper"


def test_a_whiteout_below_a_directory_the_layer_replaces():
    lower = [*_LOWER, symlink("l", "d")]
    upper = [directory("l"), entry("l/.wh.old"), entry("l/x", b"x")]
    found = listing(merged(lower, upper))
    assert found["d/old"] == b"old", "the marker reached through a link that is gone"
    assert found["l/x"] == b"x"


def test_aufs_metadata_is_skipped():
    upper = [directory(".wh..wh.plnk"), entry(".wh..wh.plnk/1.2", b"x"), entry(".wh..wh.aufs")]
    assert listing(merged(_LOWER, upper)) == listing(merged(_LOWER))


def test_replacing_kinds():
    lower = [directory("a"), entry("a/x", b"x"), entry("b", b"b"), symlink("c", "a")]
    upper = [entry("a", b"now a file"), directory("b"), directory("c"), entry("c/y", b"y")]
    assert listing(merged(lower, upper)) == {
        "a": b"now a file",
        "b": "directory",
        "c": "directory",
        "c/y": b"y",
    }


def test_metadata_of_a_directory_is_updated_and_its_children_stay():
    upper = [directory("d", mode=0o2750, uid=7, gid=8, mtime=9)]
    node = merged(_LOWER, upper).find(b"d")
    assert (node.mode, node.uid, node.gid, node.mtime) == (0o2750, 7, 8, 9)
    assert set(node.children) == {b"old", b"sub"}


def test_hard_links_share_one_node_across_layers():
    tree = merged(_LOWER, [hardlink("h", "/f"), hardlink("d/h2", "./h")])
    assert tree.find(b"h") is tree.find(b"f") is tree.find(b"d/h2")


def test_a_link_outlives_the_name_it_was_made_from():
    tree = merged(_LOWER, [hardlink("h", "f"), entry(".wh.f")])
    assert "f" not in listing(tree)
    assert listing(tree)["h"] == b"lower"


def test_parents_that_are_links_are_followed_inside_the_root():
    lower = [directory("usr"), directory("usr/lib"), symlink("lib", "usr/lib")]
    upper = [entry("lib/x", b"x"), symlink("up", "../../../../usr"), entry("up/y", b"y")]
    found = listing(merged(lower, upper))
    assert found["usr/lib/x"] == b"x"
    assert found["usr/y"] == b"y"


def test_absolute_link_to_the_host_stays_inside(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = merged([symlink("out", str(outside)), entry("out/file", b"x")])
    assert list(outside.iterdir()) == []
    assert listing(tree)[str(outside).lstrip("/") + "/file"] == b"x"


def test_devices_fifos_modes_owners_and_attributes():
    info, data = entry("cap", b"x", mode=0o4755, uid=1000, gid=2**31)
    info.pax_headers = {"SCHILY.xattr.user.k": "v", "SCHILY.xattr.com.example.other": "dropped"}
    tree = merged(
        [
            (info, data),
            entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
            entry("pipe", type=tarfile.FIFOTYPE),
        ]
    )
    cap = tree.find(b"cap")
    assert (cap.mode, cap.uid, cap.gid, cap.xattrs) == (0o4755, 1000, 2**31, {b"user.k": b"v"})
    assert (tree.find(b"null").kind, tree.find(b"null").device) == (Kind.CHAR, (1, 3))
    assert (tree.find(b"sda").kind, tree.find(b"sda").device) == (Kind.BLOCK, (8, 0))
    assert tree.find(b"pipe").kind is Kind.FIFO


_LOOP = [symlink("a", "b"), symlink("b", "a")]

HOSTILE = {
    "parent of the root": ([entry("../x", b"x")], r"'\.\.'"),
    "parent inside": ([entry("a/../../x", b"x")], r"'\.\.'"),
    "absolute with parent": ([entry("/../etc/passwd", b"x")], r"'\.\.'"),
    "link to outside": ([hardlink("x", "../../etc/passwd")], r"'\.\.'"),
    "link to nothing": ([hardlink("x", "etc/passwd")], "does not exist"),
    "link to a directory": ([directory("d"), hardlink("x", "d")], "the directory"),
    "link to itself": ([hardlink("x", "x")], "does not exist"),
    "link through a loop": ([*_LOOP, hardlink("x", "a/y")], "symbolic links"),
    "parent in a loop": ([*_LOOP, entry("a/x", b"x")], "symbolic links"),
    "parent is a file": ([entry("f", b"x"), entry("f/x", b"x")], "not a directory"),
    "parent is a device": (
        [entry("n", type=tarfile.CHRTYPE), entry("n/x", b"x")],
        "not a directory",
    ),
    "root is a file": ([entry("./", b"", type=tarfile.SYMTYPE, linkname="/etc")], "root"),
    "name too long": ([entry("n" * 256, b"x")], "256 bytes"),
    "path too long": ([entry("d/" * 2100 + "x", b"x")], "bytes, more than"),
    "whiteout of nothing": ([entry(".wh.", b"")], "whiteout"),
    "whiteout of the parent": ([entry("d/.wh...", b"")], "whiteout"),
    "whiteout of itself": ([entry("d/.wh..", b"")], "whiteout"),
    "empty link": ([symlink("x", "")], "symbolic link"),
    "endless link": ([symlink("x", "y" * 5000)], "symbolic link"),
    "device out of range": (
        [entry("n", type=tarfile.CHRTYPE, devmajor=5000)],
        "device number",
    ),
}


@pytest.mark.parametrize(("entries", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_layers_are_refused_and_named(entries, message):
    lower = [directory("d")] if "whiteout" in message else []
    with pytest.raises(BuildError, match=message) as caught:
        merged(lower, entries)
    assert "layer 2" in caught.value.message
    assert "entry" in caught.value.message
    assert caught.value.hint


def test_more_files_than_allowed(monkeypatch):
    monkeypatch.setattr(tree_module, "MAX_NODES", 10)
    with pytest.raises(BuildError, match="more than 10 files"):
        merged([entry(f"f{number}", b"") for number in range(20)])
    with pytest.raises(BuildError, match="more than 10 files"):  # implied directories count too
        merged([entry("/".join("abcdefghijkl"), b"")])


_NAMES = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "a/a/b", "/b/../a", "..", "a/.wh.a"])
_ANY = st.one_of(
    st.builds(directory, _NAMES),
    st.builds(entry, _NAMES, st.just(b"x")),
    st.builds(symlink, _NAMES, st.sampled_from(["a", "../b", "/", "..", "a/b", "/a/../b"])),
    st.builds(hardlink, _NAMES, _NAMES),
    st.builds(entry, st.sampled_from([".wh.a", "a/.wh..wh..opq", ".wh..wh..opq", "b/.wh.b"])),
)


@given(st.lists(st.lists(_ANY, max_size=8), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_layers_give_a_tree_or_a_build_error(layers):
    try:
        tree = merged(*layers)
    except BuildError:
        return
    for path, node in tree.walk():
        assert b".." not in path.split(b"/")
        assert not path.rpartition(b"/")[2].startswith(b".wh.")
        assert node.kind is Kind.DIRECTORY or not node.children
