"""Merged images against an independent implementation: umoci unpacks the same layout."""

import gzip
import json
import os
import random
import stat
import subprocess
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from source_trees import LayoutWriter, directory, entry, hardlink, make_tar, symlink

from smolbuild.core.events import silent
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
        }.get(node.kind, node.device if node.kind is Kind.CHAR else b"")
        mode = 0 if node.kind is Kind.SYMLINK else node.mode
        found[name] = [node.kind.value, mode, node.uid, node.gid, what, names[id(node)]]
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
        else:
            kind, what = "file", path.read_bytes()
        found[name] = [kind, mode, status.st_uid, status.st_gid, what, names[status.st_ino]]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_merged_tree_is_the_one_umoci_unpacks(tmp_path, seed):
    rng = random.Random(seed)
    layers = [_layer(rng, number) for number in range(rng.randrange(2, 5))]
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
        ours = _ours(merge(image, tmp_path, resources, silent))
    theirs = _theirs(tmp_path / "bundle/rootfs")
    del ours[""], theirs[""]  # no layer says anything of the root itself
    assert json.dumps(ours, default=repr, indent=1) == json.dumps(theirs, default=repr, indent=1)
