"""An artifact's disk in other people's formats: image archives and disk images.

Formats: Docker Image Specification v1.2 ("Combined Image JSON + Filesystem Changeset Format") and
OCI image-spec v1.1. An image has one layer, a tar that is not compressed, so that the same artifact
gives the same bytes whatever library compresses. Nothing is held in memory but names and metadata.
"""

import contextlib
import hashlib
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.core.errors import HostError, UsageError
from smolbuild.core.events import Emit, Transfer
from smolbuild.core.files import atomic_file, fsync_directory, require_file, require_space
from smolbuild.core.process import run
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.source.ext4_reader import Ext4
from smolbuild.source.image_config import ARCHITECTURE
from smolbuild.source.tarwriter import END, tree_members
from smolbuild.source.tree import Kind, Tree
from smolbuild.store.disk import DiskReader
from smolbuild.store.materialise import Materialised
from smolbuild.store.unpack import sync_file

__all__ = [
    "disk_tree",
    "export_docker_archive",
    "export_oci_archive",
    "export_qcow2",
    "refuse_existing",
]

_BLOCK = 512
_EVERY = 8 << 20
_CONVERT_SECONDS = 3600.0
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


@contextlib.contextmanager
def disk_tree(files: Materialised) -> Iterator[Tree]:
    """Give what the artifact's disk holds; contents are read from the disk inside the block.

    The file system's own ``lost+found`` is left out when it is empty.

    Raises:
        VerificationError: the file system is damaged.

    """
    with DiskReader.of(files) as disk:
        tree = Ext4(disk.read, disk.size).tree()
        lost = tree.root.children.get(b"lost+found")
        if lost is not None and lost.kind is Kind.DIRECTORY and not lost.children:
            del tree.root.children[b"lost+found"]
        yield tree


def export_docker_archive(
    tree: Tree, config: ArtifactConfig, path: Path, *, name: str, emit: Emit
) -> None:
    """Write an archive for ``docker load`` to ``path``; it appears there when it is complete.

    Deterministic: the same artifact and name give the same bytes.

    Args:
        tree: of ``disk_tree``.
        config: the artifact's.
        path: a file there is replaced.
        name: repository and tag of the image.
        emit: receives how far it is.

    Raises:
        HostError: no space.

    """
    with _archive(tree, path) as archive:
        layer = archive.stream(
            lambda digest: f"{hex_of(digest)}.tar", _layer(tree), _progress(tree, emit)
        )
        image = _image_config(config, layer.digest)
        image_name = f"{hex_of(digest_bytes(image))}.json"
        archive.add(image_name, image)
        layers = [f"{hex_of(layer.digest)}.tar"]
        manifest: Json = [{"Config": image_name, "RepoTags": [name], "Layers": layers}]
        archive.add("manifest.json", _json(manifest))


def export_oci_archive(
    tree: Tree, config: ArtifactConfig, path: Path, *, name: str, emit: Emit
) -> None:
    """Write an OCI layout in a tar to ``path``; see ``export_docker_archive``.

    The tag of ``name`` is the image's name in the layout.
    """
    with _archive(tree, path) as archive:
        archive.add("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        layer = archive.stream(_blob, _layer(tree), _progress(tree, emit))
        image = archive.blob(_image_config(config, layer.digest))
        manifest = archive.blob(
            _json(
                {
                    "schemaVersion": 2,
                    "mediaType": _MANIFEST_TYPE,
                    "config": image.descriptor(_CONFIG_TYPE),
                    "layers": [layer.descriptor(_LAYER_TYPE)],
                }
            )
        )
        annotations: Json = {"org.opencontainers.image.ref.name": name.rpartition(":")[2]}
        entry: Json = {**manifest.descriptor(_MANIFEST_TYPE), "annotations": annotations}
        archive.add("index.json", _json({"schemaVersion": 2, "manifests": [entry]}))


def export_qcow2(files: Materialised, path: Path, *, compress: bool) -> None:
    """Write the disk as one qcow2 image without a backing file; it appears when it is complete.

    With ``compress`` its clusters are zstd. Deterministic for one version of qemu-img.

    Raises:
        HostError: qemu-img is missing or failed, or there is no space.

    """
    source = {
        "driver": "qcow2",
        "file": {"driver": "file", "filename": str(files.overlay)},
        "backing": {"driver": "raw", "file": {"driver": "file", "filename": str(files.base)}},
    }
    require_file(path)
    options = ["-c", "-o", "compression_type=zstd"] if compress else []
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=path.parent) as directory:
        target = Path(directory, "disk.qcow2")
        command = ["qemu-img", "convert", "-O", "qcow2", *options, f"json:{json.dumps(source)}"]
        done = run([*command, str(target)], timeout=_CONVERT_SECONDS)
        if done.status != 0:
            raise HostError(
                f"qemu-img could not write {path}: {done.stderr.decode(errors='replace').strip()}",
                code="qemu-img",
            )
        sync_file(target)
        target.replace(path)
        fsync_directory(path.parent)


@dataclass(frozen=True, slots=True)
class _Blob:
    digest: Digest
    size: int

    def descriptor(self, media_type: str) -> dict[str, Json]:
        return {"mediaType": media_type, "digest": self.digest, "size": self.size}


class _Archive:
    """A tar written to a file that can seek, so a member may be named after its own content."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def add(self, name: str, data: bytes) -> None:
        self._stream.write(_header(name, len(data)) + data + bytes(-len(data) % _BLOCK))

    def blob(self, data: bytes) -> _Blob:
        blob = _Blob(digest_bytes(data), len(data))
        self.add(_blob(blob.digest), data)
        return blob

    def stream(
        self,
        name: Callable[[Digest], str],
        chunks: Iterable[bytes],
        progress: Callable[[int], None],
    ) -> _Blob:
        start = self._stream.tell()
        self._stream.write(bytes(_BLOCK))
        hasher, size = hashlib.sha256(), 0
        for chunk in chunks:
            hasher.update(chunk)
            self._stream.write(chunk)
            size += len(chunk)
            progress(size)
        self._stream.write(bytes(-size % _BLOCK))
        end = self._stream.tell()
        blob = _Blob(Digest("sha256:" + hasher.hexdigest()), size)
        self._stream.seek(start)
        self._stream.write(_header(name(blob.digest), size))
        self._stream.seek(end)
        return blob


@contextlib.contextmanager
def _archive(tree: Tree, path: Path) -> Iterator[_Archive]:
    require_space(path.parent, _bytes(tree), what=f"writing {path.name}")
    with atomic_file(path, mode=0o644) as stream:
        yield _Archive(stream)
        stream.write(END)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    # GNU's form has room for any size in one block; pax would need a member before this one.
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def _blob(digest: Digest) -> str:
    return f"blobs/sha256/{hex_of(digest)}"


def _layer(tree: Tree) -> Iterator[bytes]:
    yield from tree_members(tree)
    yield END


def _bytes(tree: Tree) -> int:
    seen = {id(node): node.content.size for _, node in tree.walk()}
    return sum(seen.values())


def _progress(tree: Tree, emit: Emit) -> Callable[[int], None]:
    total, said = _bytes(tree), 0

    def progress(done: int) -> None:
        nonlocal said
        if done - said >= _EVERY:
            said = done
            emit(Transfer(what="export", done=done, total=max(total, done)))

    return progress


def _image_config(config: ArtifactConfig, layer: Digest) -> bytes:
    run_config = config.run
    ports: dict[str, Json] = {f"{guest}/tcp": {} for _, guest in run_config.ports}
    inner: dict[str, Json] = {
        "Env": [f"{name}={value}" for name, value in run_config.env],
        "Entrypoint": list(run_config.entrypoint) or None,
        "Cmd": list(run_config.cmd) or None,
        "WorkingDir": run_config.workdir,
        "User": run_config.user,
        "ExposedPorts": ports or None,
    }
    return _json(
        {
            "created": config.created,
            "architecture": ARCHITECTURE,
            "os": config.os,
            "config": {key: value for key, value in inner.items() if value is not None},
            "rootfs": {"type": "layers", "diff_ids": [layer]},
            "history": [{"created": config.created, "created_by": "smolbuild"}],
        }
    )


def _json(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse to write a file where something is already.

    Raises:
        UsageError: there is a directory, or a file and not ``force``; or no directory for it.

    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint="name a file", code="exists")
    if path.exists() and not force:
        raise UsageError(f"{path} exists", hint="--force replaces it", code="exists")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}", code="no-directory")
