"""Exported archives, directories and disks, read by docker, skopeo, umoci and qemu."""

import json
import os
import stat
import struct
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from smolbuild.build.export import (
    disk_tree,
    export_docker_archive,
    export_oci_archive,
    export_qcow2,
)
from smolbuild.build.export_rootfs import export_rootfs
from smolbuild.core.errors import HostError, UsageError
from smolbuild.core.events import Transfer, silent
from smolbuild.model.artifact import RunConfig
from smolbuild.source.content import bytes_content
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.ext4_reader import open_disk
from smolbuild.source.tree import Kind, Node, Tree
from smolbuild.store.qcow2 import create_overlay

SIZE = 64 << 20
CONFIG = SimpleNamespace(
    created="2026-01-01T00:00:00Z",
    os="linux",
    run=RunConfig(
        env=(("PATH", "/bin"), ("A", "b=c")),
        workdir="/srv",
        user="web",
        entrypoint=("/bin/sh",),
        cmd=("-c", "cat /etc/mark"),
        ports=((18000, 8000),),
    ),
)
CAPABILITY = struct.pack("<5I", 0x02000001, 0x400, 0, 0, 0)


def _tree() -> Tree:
    tree = Tree()
    tree.put(b"bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755, mtime=1_600_000_000)
    for name in (b"sh", b"cat"):
        tree.root.children[b"bin"].children[name] = Node(kind=Kind.SYMLINK, target=b"busybox")
    tree.put(b"etc/mark", b"marked\n", mtime=1_600_000_001)
    tree.put(b"etc/passwd", b"web:x:1000:1000::/:/bin/sh\n")
    tree.ensure_directory(b"srv", mode=0o1777)
    mark = tree.find(b"etc/mark")
    mark.xattrs[b"security.capability"] = CAPABILITY
    tree.root.children[b"linked"] = mark
    long = b"d" * 200 + b"/" + b"n" * 200
    tree.put(long, b"long", mode=0o4751)
    tree.find(long).uid, tree.find(long).gid = 3_000_000, 70_000
    tree.put(b"odd/\xff\xfe\n", b"bytes")
    tree.root.children[b"null"] = Node(kind=Kind.CHAR, device=(1, 3), mode=0o666)
    tree.root.children[b"pipe"] = Node(kind=Kind.FIFO, mode=0o600, uid=5)
    tree.root.children[b"away"] = Node(kind=Kind.SYMLINK, target=b"/etc/passwd", uid=7)
    tree.root.children[b"empty"] = Node(kind=Kind.FILE, content=bytes_content(b""), mode=0)
    tree.put(b"sparse", bytes(3 << 20) + b"end")
    return tree


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("artifact")
    write_ext4(_tree(), directory / "base.raw", SIZE)
    create_overlay(directory / "overlay.qcow2", SIZE)
    return SimpleNamespace(base=directory / "base.raw", overlay=directory / "overlay.qcow2")


def test_docker_loads_and_runs_what_is_exported(files, docker_engine, tmp_path):
    path, events = tmp_path / "image.tar", []
    with disk_tree(files) as tree:
        export_docker_archive(tree, CONFIG, path, name="export/one:v2", emit=events.append)
    with path.open("rb") as stream:
        (image,) = docker_engine.client.images.load(stream)
    assert image.tags == ["export/one:v2"]
    assert image.attrs["Architecture"] == "amd64"
    config = image.attrs["Config"]
    assert config["Env"] == ["PATH=/bin", "A=b=c"]
    assert (config["User"], config["WorkingDir"]) == ("web", "/srv")
    assert config["ExposedPorts"] == {"8000/tcp": {}}
    said = docker_engine.client.containers.run(image.id, network_mode="none", remove=True)
    assert said == b"marked\n"
    again = tmp_path / "again.tar"
    with disk_tree(files) as tree:
        export_docker_archive(tree, CONFIG, again, name="export/one:v2", emit=silent)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again.tar", "image.tar"]


def _facts(root: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for place, directories, others in os.walk(os.fsencode(root)):
        for name in [*directories, *others]:
            path = place + b"/" + name
            status = os.lstat(path)
            inner = os.fsdecode(os.path.relpath(path, os.fsencode(root)))
            link = stat.S_ISLNK(status.st_mode)
            regular = stat.S_ISREG(status.st_mode)
            content = b""
            if link or regular:
                file = Path(os.fsdecode(path))
                content = os.fsencode(file.readlink()) if link else file.read_bytes()
            found[inner] = (
                stat.S_IFMT(status.st_mode),
                None if link else stat.S_IMODE(status.st_mode),
                status.st_uid,
                status.st_gid,
                status.st_rdev,
                content,
                None if stat.S_ISDIR(status.st_mode) else status.st_mtime,
                {} if link else {n: os.getxattr(path, n) for n in os.listxattr(path)},
                status.st_nlink if regular else 0,
            )
    return found


def _links(root: Path) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for place, _, others in os.walk(root):
        for name in others:
            path = Path(place, name)
            names.setdefault(path.lstat().st_ino, []).append(str(path.relative_to(root)))
    return {tuple(sorted(found)) for found in names.values() if len(found) > 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make owners and devices")
def test_umoci_unpacks_what_the_directory_holds(files, tmp_path):
    """The OCI archive and the root directory say the same, one of them read by others' code."""
    archive, rootfs = tmp_path / "oci.tar", tmp_path / "rootfs"
    with disk_tree(files) as tree:
        export_oci_archive(tree, CONFIG, archive, name="a/b:v1", emit=silent)
        losses = export_rootfs(tree, rootfs, owners=True, emit=silent)
    assert losses.sentences() == []
    shown = _run("skopeo", "inspect", f"oci-archive:{archive}:v1")
    assert json.loads(shown)["Env"] == ["PATH=/bin", "A=b=c"]
    _run("skopeo", "copy", f"oci-archive:{archive}:v1", f"oci:{tmp_path}/layout:v1")
    _run("umoci", "unpack", "--image", f"{tmp_path}/layout:v1", str(tmp_path / "bundle"))
    theirs, ours = _facts(tmp_path / "bundle/rootfs"), _facts(rootfs)
    assert ours == theirs
    assert ours["d" * 200 + "/" + "n" * 200][1:4] == (0o4751, 3_000_000, 70_000)
    assert ours["etc/mark"][7] == {"security.capability": CAPABILITY}
    assert _links(rootfs) == {("etc/mark", "linked")} == _links(tmp_path / "bundle/rootfs")
    assert (rootfs / "sparse").stat().st_blocks * 512 < 1 << 20, "holes were written"
    assert "lost+found" not in ours


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_users_directory_says_what_it_lacks(files, tmp_path):
    with disk_tree(files) as tree:
        losses = export_rootfs(tree, tmp_path / "root", owners=False, emit=silent)
    text = "\n".join(losses.sentences())
    for what in ("devices left out: 1", "set-id bits left out: 1", "attributes left out: 1"):
        assert what in text
    status = (tmp_path / "root" / ("d" * 200) / ("n" * 200)).stat()
    assert stat.S_IMODE(status.st_mode) == 0o751
    assert {path.lstat().st_uid for path in (tmp_path / "root").iterdir()} == {os.getuid()}
    assert not (tmp_path / "root" / "null").exists()


def test_a_directory_that_is_not_empty_is_refused_and_nothing_is_left(files, tmp_path):
    target = tmp_path / "root"
    target.mkdir()
    with disk_tree(files) as tree:
        export_rootfs(tree, target, owners=False, emit=silent)
        before = sorted(target.iterdir())
        with pytest.raises(UsageError, match="not an empty directory"):
            export_rootfs(tree, target, owners=False, emit=silent)
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(UsageError, match="not an empty directory"):
            export_rootfs(tree, tmp_path / "link", owners=False, emit=silent)
    assert sorted(target.iterdir()) == before
    deep = Tree()
    deep.ensure_directory(b"/".join([b"d"] * 400))
    with pytest.raises(HostError, match="nest more than"):
        export_rootfs(deep, tmp_path / "deep", owners=False, emit=silent)
    assert {path.name for path in tmp_path.iterdir()} == {"root", "link"}


def test_no_link_in_the_tree_leads_outside(tmp_path):
    """A tree has one node a name, so a link and what lies below its name cannot both be there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = Tree()
    tree.root.children[b"out"] = Node(kind=Kind.SYMLINK, target=os.fsencode(outside))
    tree.put(b"dir/file", b"x")
    tree.root.children[b"z"] = tree.root.children[b"out"]
    export_rootfs(tree, tmp_path / "root", owners=False, emit=silent)
    assert list(outside.iterdir()) == []
    assert (tmp_path / "root/z").is_symlink()


@pytest.mark.parametrize("compress", [False, True])
def test_the_disk_as_qcow2_is_whole(files, tmp_path, compress):
    path = tmp_path / "disk.qcow2"
    export_qcow2(files, path, compress=compress)
    info = json.loads(_run("qemu-img", "info", "--output=json", str(path)))
    assert (info["format"], info["virtual-size"]) == ("qcow2", SIZE)
    assert "backing-filename" not in info
    _run("qemu-img", "convert", "-O", "raw", str(path), str(tmp_path / "raw"))
    assert (tmp_path / "raw").read_bytes() == files.base.read_bytes()
    with open_disk(tmp_path / "raw") as disk:
        assert any(node.path == b"/etc/mark" for node in disk.walk())
    first = path.read_bytes()
    export_qcow2(files, path, compress=compress)
    assert path.read_bytes() == first


def test_the_layer_is_streamed_with_progress(files, tmp_path):
    tree = Tree()
    tree.put(b"big", b"x" * (20 << 20))
    events: list[Transfer] = []
    export_oci_archive(tree, CONFIG, tmp_path / "x.tar", name="a:b", emit=events.append)
    assert len(events) >= 2
    with tarfile.open(tmp_path / "x.tar") as archive:
        names = archive.getnames()
    assert names[0] == "oci-layout"
    assert names[-1] == "index.json"
