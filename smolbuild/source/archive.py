"""An image in an archive file: ``docker save`` or an OCI layout in a tar, compressed or not.

Docker's format: Docker Image Specification v1.2, "Combined Image JSON + Filesystem Changeset
Format". What newer Docker versions save is both at once; the OCI half, which has a digest for every
blob, is used then.
"""

import contextlib
import itertools
import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from smolbuild.core.digest import Digest, digest_bytes, digest_value
from smolbuild.core.errors import BuildError, UsageError, VerificationError
from smolbuild.source.content import FileBacking, Region
from smolbuild.source.image import Layer, LoadedImage
from smolbuild.source.image_config import parse_config
from smolbuild.source.oci_layout import load_layout
from smolbuild.source.tar import read_tar
from smolbuild.source.unpack import unpacked

__all__ = ["load_archive", "load_saved"]

_MAX_JSON = 4 << 20
_MAX_FILES = 100_000
_MAX_LINKS = 8


@contextlib.contextmanager
def load_saved(path: Path, image: Digest) -> Iterator[LoadedImage]:
    """Give the image with the ID ``image`` from what a Docker engine saved at ``path``.

    An ID is the digest of the configuration; of engines that keep images in containerd it is that
    of the manifest or index.

    Raises:
        VerificationError: the archive holds another image, or something has not its digest.
        BuildError: it is no image archive, or is cut short.

    """
    what = f"image {image} as the Docker engine saved it"
    with FileBacking(path) as backing:
        files = _Files.index(Region(backing, 0, backing.size), what)
        if files.has("manifest.json"):
            loaded = _load_docker(files, "", what)
            if loaded.config_digest == image:
                yield loaded
                return
        if files.has("index.json") and files.has("oci-layout"):
            yield load_layout(files.open, image, what=what)
            return
    raise VerificationError(
        f"{what} is another image",
        hint="build again when nothing changes the engine's images any more",
        code="digest-mismatch",
    )


@contextlib.contextmanager
def load_archive(path: Path, selector: str, work: Path) -> Iterator[LoadedImage]:
    """Give the image in the archive at ``path``; its layers can be read inside the block.

    Args:
        path: a tar, plain or compressed with gzip or zstd.
        selector: a name (``repository:tag`` or OCI name), a digest, or ``""`` for the only image.
        work: takes the decompressed archive (an unnamed file).

    Raises:
        UsageError: the selector names nothing, or is needed.
        VerificationError: something does not have its digest, or is malformed.
        BuildError: it is no image archive, is cut short, or no image is for our platform.

    """
    what = str(path)
    with (
        FileBacking(path) as backing,
        unpacked(Region(backing, 0, backing.size), work, what=what) as (plain, _),
    ):
        files = _Files.index(plain, what)
        if files.has("index.json") and files.has("oci-layout"):
            yield load_layout(files.open, selector, what=what)
        elif files.has("manifest.json"):
            yield _load_docker(files, selector, what)
        else:
            raise BuildError(
                f"{what} is not an image archive: it has neither manifest.json nor index.json",
                hint="make one with `docker save -o image.tar NAME` or `skopeo copy … "
                "oci-archive:image.tar`; an unpacked root goes into a directory",
                code="not-an-image",
            )


@dataclass(frozen=True, slots=True)
class _Files:
    """The regular files of an archive by name, links between them followed."""

    regions: Mapping[str, Region]
    links: Mapping[str, str]
    what: str

    @classmethod
    def index(cls, plain: Region, what: str) -> "_Files":
        regions: dict[str, Region] = {}
        links: dict[str, str] = {}
        try:
            for entry in itertools.islice(read_tar(plain), _MAX_FILES):
                name = posixpath.normpath(os.fsdecode(entry.name))
                if entry.kind == "file" and len(entry.content.segments) <= 1:
                    start = entry.content.segments[0].offset if entry.content.segments else 0
                    regions[name] = Region(plain.backing, start, entry.content.size)
                elif entry.kind == "symlink":  # layers that older Docker versions share
                    target = posixpath.join(posixpath.dirname(name), os.fsdecode(entry.target))
                    links[name] = posixpath.normpath(target)
                elif entry.kind == "link":
                    links[name] = posixpath.normpath(os.fsdecode(entry.target))
        except BuildError as error:
            raise BuildError(
                f"{what} is not a readable archive: {error.message}",
                hint="write the archive anew",
                code="bad-archive",
            ) from error
        return cls(regions, links, what)

    def has(self, name: str) -> bool:
        return name in self.regions

    def open(self, name: str) -> contextlib.AbstractContextManager[Region]:
        wanted = posixpath.normpath(name)
        for _ in range(_MAX_LINKS):
            if wanted in self.regions:
                return contextlib.nullcontext(self.regions[wanted])
            wanted = self.links.get(wanted, "")
        raise BuildError(
            f"{self.what} lacks the file {name!r}",
            hint="the archive is incomplete: write it anew",
            code="bad-archive",
        )

    def read(self, name: str) -> bytes:
        with self.open(name) as region:
            return region.read(limit=_MAX_JSON, what=f"{name} of {self.what}")


def _load_docker(files: _Files, selector: str, what: str) -> LoadedImage:
    entry = _docker_entry(files, selector, what)
    name, layers = entry.get("Config"), entry.get("Layers")
    if not isinstance(name, str) or not isinstance(layers, list):
        _bad(what, "manifest.json has no Config or Layers")
    if not all(isinstance(layer, str) for layer in layers):
        _bad(what, "Layers in manifest.json is not a list of names")
    data = files.read(name)
    config, diff_ids = parse_config(data, f"the configuration of {what}")
    if len(diff_ids) != len(layers):
        _bad(what, f"{len(layers)} layers, but {len(diff_ids)} diff ids")
    digest = digest_bytes(data)
    stem = posixpath.basename(name).removesuffix(".json")
    if len(stem) == 64 and digest != f"sha256:{stem}":
        raise VerificationError(
            f"the configuration of {what} has the digest {digest}, but is named {stem}",
            hint="the archive is damaged or was tampered with: write it anew",
            code="digest-mismatch",
        )
    return LoadedImage(
        layers=tuple(
            Layer(
                name=f"layer {diff_id} of {what}",
                open=lambda layer=layer: files.open(layer),  # type: ignore[misc]
                digest=None,
                diff_id=diff_id,
            )
            for layer, diff_id in zip(layers, diff_ids, strict=True)
        ),
        config=config,
        digest=digest_value(
            "smolbuild.docker-archive.v1", {"config": digest, "layers": list(diff_ids)}
        ),
        config_digest=digest,
    )


def _docker_entry(files: _Files, selector: str, what: str) -> Mapping[str, object]:
    try:
        entries = json.loads(files.read("manifest.json"))
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"manifest.json of {what} is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        _bad(what, "manifest.json is not a list of objects")
    tags: dict[str, Mapping[str, object]] = {
        tag: entry
        for entry in entries
        for tag in entry.get("RepoTags") or []
        if isinstance(tag, str)
    }
    listed = ", ".join(sorted(tags)[:20]) or "no named image"
    if selector:
        short = {tag.rpartition(":")[2]: entry for tag, entry in tags.items()}
        chosen = tags.get(selector) or short.get(selector)
        if chosen is None:
            raise UsageError(
                f"{what} has no image named {selector!r}",
                hint=f"it has {listed}",
                code="image-selector",
            )
        return chosen
    if len(entries) != 1:
        raise UsageError(
            f"{what} holds {len(entries)} images: say which",
            hint=f"append :NAME, one of {listed}",
            code="image-selector",
        )
    first: Mapping[str, object] = entries[0]
    return first


def _bad(what: str, problem: str) -> NoReturn:
    raise VerificationError(f"{what}: {problem}", code="malformed")
