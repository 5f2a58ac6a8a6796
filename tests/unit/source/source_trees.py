"""Archives, trees and images for the tests of smolbuild.source."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st

from smolbuild.source.content import BytesBacking, Region, bytes_content
from smolbuild.source.tree import Kind, Node, Tree


def region(data: bytes) -> Region:
    return Region(BytesBacking(data), 0, len(data))


def entry(name: str, data: bytes | None = None, **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data or b"")
    info.mode = 0o644
    for key, value in facts.items():
        setattr(info, key, value)
    return info, data or b""


def directory(name: str, **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, **({"mode": 0o755} | facts))


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777)


def hardlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def make_tar(
    entries: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT
) -> bytes:
    file = io.BytesIO()
    with tarfile.open(
        fileobj=file, mode="w", format=form, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def listing(tree: Tree) -> dict[str, object]:
    """Return what a tree holds, for comparing: content, target or children's marker by path."""
    found: dict[str, object] = {}
    for path, node in tree.walk():
        name = os.fsdecode(path)
        if node.kind is Kind.FILE:
            found[name] = node.content.read(0, node.content.size)
        elif node.kind is Kind.SYMLINK:
            found[name] = "-> " + os.fsdecode(node.target)
        else:
            found[name] = node.kind.value
    del found[""]
    return found


def fsck(image: Path) -> str:
    """Return what e2fsck finds; empty when the file system is clean."""
    done = subprocess.run(
        ["e2fsck", "-fn", str(image)], capture_output=True, check=False, text=True, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def debugfs(image: Path, *commands: str, write: bool = False) -> str:
    done = subprocess.run(
        ["debugfs", *(["-w"] if write else []), "-f", "-", str(image)],
        input="\n".join(commands) + "\n",
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
        errors="surrogateescape",
    )
    return done.stdout


NAMES = st.one_of(
    st.sampled_from([b"a", b"b", b"bin", b"etc", b"lib", b"x" * 255, b"\xff\xfe", b" ", b"lost"]),
    st.binary(min_size=1, max_size=20)
    .map(lambda raw: raw.replace(b"\0", b"0").replace(b"/", b"_"))
    .filter(lambda raw: raw not in (b".", b"..")),
)
_BLOCKS = st.lists(st.sampled_from([bytes(4096), b"\x01" * 4096, b"ab" * 2048]), max_size=12)
CONTENT = st.one_of(
    st.binary(max_size=64),
    st.tuples(_BLOCKS, st.binary(max_size=9)).map(lambda parts: b"".join(parts[0]) + parts[1]),
)
XATTRS = st.dictionaries(
    st.sampled_from([b"user.a", b"user.longer-name", b"security.capability", b"trusted.t"]),
    st.one_of(st.binary(max_size=12), st.binary(min_size=100, max_size=600)),
    max_size=4,
)
_OWNERS = st.integers(0, 2**32 - 2)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    kind = draw(st.sampled_from([k for k in Kind if k is not Kind.DIRECTORY]))
    node = Node(
        kind=kind,
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(_OWNERS),
        gid=draw(_OWNERS),
        mtime=draw(st.integers(-(2**40), 2**40)),
        xattrs=draw(XATTRS),
    )
    if kind is Kind.FILE:
        node.content = bytes_content(draw(CONTENT))
    elif kind is Kind.SYMLINK:
        length = draw(st.sampled_from([1, 59, 60, 61, 4095]))
        node.target = draw(st.binary(min_size=1, max_size=1)).replace(b"\0", b"t") * length
    elif kind in (Kind.CHAR, Kind.BLOCK):
        node.device = draw(st.tuples(st.integers(0, 4095), st.integers(0, 2**20 - 1)))
    return node


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree()
    directories, files = [tree.root], []
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.sampled_from(directories))
        name = draw(NAMES)
        if name in parent.children or (parent is tree.root and name == b"lost+found"):
            continue
        what = draw(st.sampled_from(["directory", "node", "node", "link"]))
        if what == "directory":
            child = Node(kind=Kind.DIRECTORY, mode=draw(st.integers(0, 0o7777)))
            directories.append(child)
        elif what == "link" and files:
            child = draw(st.sampled_from(files))
        else:
            child = draw(nodes())
            files.append(child)
        parent.children[name] = child
    return tree


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def image_config(diff_ids: list[str], **config: object) -> bytes:
    return json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    ).encode()


class LayoutWriter:
    """Writes an OCI layout into a directory, blob by blob."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "blobs/sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        self.manifests: list[dict[str, object]] = []

    def blob(self, data: bytes, media_type: str) -> dict[str, object]:
        digest = sha256(data)
        (self.directory / "blobs/sha256" / digest[7:]).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def manifest(self, layers: list[bytes], plain: list[bytes], config: bytes | None = None):
        content = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.blob(
                config or image_config([sha256(data) for data in plain]),
                "application/vnd.oci.image.config.v1+json",
            ),
            "layers": [
                self.blob(data, "application/vnd.oci.image.layer.v1.tar+gzip") for data in layers
            ],
        }
        return self.blob(json.dumps(content).encode(), content["mediaType"])

    def index(self, manifests: list[dict[str, object]]) -> dict[str, object]:
        content = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": manifests,
        }
        return self.blob(json.dumps(content).encode(), content["mediaType"])

    def write(self, manifests: list[dict[str, object]]) -> None:
        (self.directory / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": manifests})
        )
