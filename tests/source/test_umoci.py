"""Merged images against an independent implementation: umoci unpacks the same layout.

What is compared is our root disk, read back: paths, types, modes, owners, attributes, contents.
"""

import gzip
import json
import os
import random
import stat
import struct
import subprocess
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from source_trees import LayoutWriter, directory, entry, hardlink, make_tar, symlink

from smolbuild.core.events import silent
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.ext4_reader import open_disk
from smolbuild.source.merge import merge
from smolbuild.source.oci_layout import load_layout, open_layout_directory
from smolbuild.source.tree import Kind, Tree

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="umoci makes owners and devices for root only"
)

REF = "org.opencontainers.image.ref.name"
_DIRECTORIES = ["a", "b", "a/c", "a/c/d", "b/e"]
_FILES = ["f", "a/f", "a/g", "b/f", "a/c/f", "a/c/d/f", "b/e/g"]


def _layer(rng: random.Random, number: int) -> bytes:
    """One layer; no set-group-id directories, whose group umoci's mkdir would inherit."""
    facts = {"uid": number, "gid": rng.randrange(5), "mtime": 1_600_000_000 + number}
    entries, taken = [], set()
    for name in rng.sample(_DIRECTORIES, rng.randrange(1, 5)):
        entries.append(directory(name, mode=rng.choice([0o755, 0o1777, 0o700]), **facts))
        taken.add(name)
        if number and rng.random() < 0.3:
            entries.append(entry(f"{name}/.wh..wh..opq"))
    for name in rng.sample(_FILES, rng.randrange(1, 6)):
        kind = rng.random()
        if number and kind < 0.25:
            parent, _, base = name.rpartition("/")
            entries.append(entry(f"{parent}/.wh.{base}" if parent else f".wh.{base}"))
        elif kind < 0.35:
            entries.append(symlink(name, rng.choice(["f", "../f", "/a/f", "nowhere"])))
        elif kind < 0.42:
            entries.append(entry(name, type=tarfile.CHRTYPE, devmajor=1, devminor=3, **facts))
        else:
            data = f"{name} of layer {number}".encode()
            entries.append(entry(name, data, mode=rng.choice([0o644, 0o4755]), **facts))
            if rng.random() < 0.4:
                link = name.rpartition("/")[0] + f"/link{number}"
                if link.lstrip("/") not in taken:
                    taken.add(link.lstrip("/"))
                    entries.append(hardlink(link.lstrip("/"), name))
    return make_tar(entries)


def _ours(tree: Tree) -> dict[str, object]:
    names: dict[int, list[str]] = {}
    found: dict[str, object] = {}
    for path, node in tree.walk():
        name = os.fsdecode(path)
        names.setdefault(id(node), []).append(name)
        what: object = {
            Kind.FILE: node.content.read(0, node.content.size),
            Kind.SYMLINK: node.target,
        }.get(node.kind, node.device if node.kind in (Kind.CHAR, Kind.BLOCK) else b"")
        mode = 0 if node.kind is Kind.SYMLINK else node.mode
        attributes = {os.fsdecode(name): value for name, value in sorted(node.xattrs.items())}
        found[name] = [node.kind.value, mode, node.uid, node.gid, what, attributes, names[id(node)]]
    return found


def _theirs(root: Path) -> dict[str, object]:
    names: dict[int, list[str]] = {}
    found: dict[str, object] = {}
    pending = [root]
    while pending:
        path = pending.pop()
        status = path.lstat()
        name = "" if path == root else os.fspath(path.relative_to(root))
        names.setdefault(status.st_ino, []).append(name)
        mode, what = stat.S_IMODE(status.st_mode), b""
        if stat.S_ISDIR(status.st_mode):
            kind = "directory"
            pending += sorted(path.iterdir(), reverse=True)
        elif stat.S_ISLNK(status.st_mode):
            kind, mode, what = "symlink", 0, os.fsencode(path.readlink())
        elif stat.S_ISCHR(status.st_mode):
            kind, what = "char", (os.major(status.st_rdev), os.minor(status.st_rdev))
        elif stat.S_ISBLK(status.st_mode):
            kind, what = "block", (os.major(status.st_rdev), os.minor(status.st_rdev))
        elif stat.S_ISFIFO(status.st_mode):
            kind = "fifo"
        else:
            kind, what = "file", path.read_bytes()
        attributes = {
            key: os.getxattr(path, key, follow_symlinks=False)
            for key in sorted(os.listxattr(path, follow_symlinks=False))
        }
        facts = [kind, mode, status.st_uid, status.st_gid, what, attributes]
        found[name] = [*facts, names[status.st_ino]]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_merged_tree_is_the_one_umoci_unpacks(tmp_path, seed):
    rng = random.Random(seed)
    layers = [_layer(rng, number) for number in range(rng.randrange(2, 5))]
    ours, theirs = both(tmp_path, layers)
    assert json.dumps(ours, default=repr, indent=1) == json.dumps(theirs, default=repr, indent=1)


def both(tmp_path: Path, layers: list[bytes]) -> tuple[dict[str, object], dict[str, object]]:
    """Return what our disk holds, and what umoci unpacks."""
    layout = LayoutWriter(tmp_path / "layout")
    manifest = layout.manifest([gzip.compress(layer) for layer in layers], layers)
    layout.write([{**manifest, "annotations": {REF: "x"}}])
    done = subprocess.run(
        ["umoci", "unpack", "--image", f"{layout.directory}:x", tmp_path / "bundle"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    image = load_layout(open_layout_directory(layout.directory), "x", what="x")
    with ExitStack() as resources:
        tree = merge(image, tmp_path, resources, silent)
        write_ext4(tree, tmp_path / "disk.raw", 32 << 20)
    with open_disk(tmp_path / "disk.raw") as disk:
        ours = _ours(disk.tree())
    theirs = _theirs(tmp_path / "bundle/rootfs")
    # No layer says anything of the root itself, and lost+found is the file system's own.
    del ours[""], theirs[""], ours["lost+found"]
    return ours, theirs


_CAPABILITY = struct.pack("<5I", 0x02000001, 0x400, 0, 0, 0)


def _xattr(name: str, value: bytes) -> dict[str, str]:
    return {f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape")}


def _hand_made() -> list[bytes]:
    """Every kind of thing that an image can hold, and every way to change it in a later layer."""
    long = "/".join(["deep" * 20] * 4) + "/" + "n" * 250
    capable = {"pax_headers": _xattr("security.capability", _CAPABILITY)}
    first = [
        directory("d", mode=0o1777, uid=7, gid=8, mtime=1_500_000_000),
        entry("d/kept", b"kept", mode=0o4755, uid=3_000_000, gid=100_000),
        entry("d/gone", b"gone"),
        entry("capable", b"c", mode=0o755, **capable),
        entry("marked", b"m", pax_headers=_xattr("user.mark", b"one")),
        directory("marked-directory", pax_headers=_xattr("user.mark", b"dir")),
        hardlink("linked", "d/kept"),
        hardlink("linked-too", "d/kept"),
        symlink("becomes-directory", "d"),
        symlink("lib", "usr/lib"),
        directory("usr/lib"),
        directory("becomes-file"),
        entry("becomes-file/inner", b"x"),
        directory("becomes-link"),
        entry("becomes-link/inner", b"x"),
        directory("opaque", mode=0o750, uid=9),
        entry("opaque/old", b"old"),
        directory("opaque/old-directory"),
        entry("opaque/old-directory/x", b"x"),
        entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        entry("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=300, mode=0o660, gid=6),
        entry("pipe", type=tarfile.FIFOTYPE, mode=0o600),
        entry(long, b"long name", mtime=1_500_000_000.5),
        entry("\udcff\udcfe", b"not utf-8"),
        entry("größe/ünïcode", b"utf-8"),
        entry("setgid", b"g", mode=0o2755, gid=42),
        entry("nothing", b"", mode=0),
    ]
    second = [
        entry("d/.wh.gone"),
        entry("lib/new.so", b"through the link"),
        entry("becomes-file", b"file now", mode=0o600),
        symlink("becomes-link", "/d"),
        directory("becomes-directory", mode=0o700),
        entry("becomes-directory/inner", b"below"),
        entry("opaque/.wh..wh..opq"),
        directory("opaque", mode=0o755),
        entry("opaque/new", b"new"),
        entry("linked", b"a file of its own now"),
        hardlink("linked-later", "d/kept"),
        entry(".wh.null"),
        entry("capable", b"changed", mode=0o755),
        entry("marked", b"m2", pax_headers=_xattr("user.mark", b"two")),
    ]
    third = [
        entry(".wh.missing"),
        directory("d", mode=0o755, uid=0, gid=0),
        entry("d/gone", b"back again"),
        entry(".wh.becomes-directory"),
        hardlink("linked-again", "linked-too"),
        entry("sub/.wh..wh..opq"),
        entry("sub/only", b"s"),
    ]
    return [make_tar(first), make_tar(second), make_tar(third)]


def test_the_hand_made_image_is_the_one_umoci_unpacks(tmp_path):
    ours, theirs = both(tmp_path, _hand_made())
    assert sorted(ours) == sorted(theirs)
    different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert different == {}
    assert ours["capable"][5] == {}
    assert ours["marked"][5] == {"user.mark": b"two"}
    links = ["d/kept", "linked-again", "linked-later", "linked-too"]
    assert ours["linked-again"][6] == links
