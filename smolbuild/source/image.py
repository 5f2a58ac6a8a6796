"""A container image that has been read and checked as far as its manifest and configuration.

Formats: OCI image-spec v1.1 (``config.md``, ``layer.md``) and Docker's image specification v1.2,
which is the same where it matters here.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import BuildError, VerificationError
from smolbuild.core.events import Emit, Message
from smolbuild.model.oci import Manifest, parse_json_object
from smolbuild.source.content import Region
from smolbuild.source.layers import apply_layer
from smolbuild.source.tree import Tree
from smolbuild.source.unpack import unpacked, verify_region

__all__ = [
    "ARCHITECTURE",
    "ImageConfig",
    "Layer",
    "LoadedImage",
    "OpenBlob",
    "image_from_manifest",
    "merge",
    "parse_config",
]

ARCHITECTURE = "amd64"
"""The only architecture whose guests smolbuild boots."""

OpenBlob = Callable[[Digest], contextlib.AbstractContextManager[Region]]
"""Gives the bytes of a blob by its digest; the bytes are not checked yet."""

_MAX_LAYERS = 1000
_MAX_CONFIG = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What an image says of how it wants to be run."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    architecture: str = ARCHITECTURE
    os: str = "linux"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: where its blob is, and the digests it must have."""

    name: str
    """Names it in errors."""
    open: Callable[[], contextlib.AbstractContextManager[Region]]
    digest: Digest | None
    """Of the blob as stored; None in old Docker archives, which only know ``diff_id``."""
    diff_id: Digest
    """Of the uncompressed tar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """An image whose layers can be merged. ``digest`` identifies it in the provenance key."""

    layers: tuple[Layer, ...]
    config: ImageConfig
    digest: Digest


def parse_config(data: bytes, what: str) -> tuple[ImageConfig, tuple[Digest, ...]]:
    """Return the run configuration and the diff ids of an image configuration's bytes.

    Raises:
        VerificationError: it is malformed.
        BuildError: it is for another operating system or architecture.

    """
    value = parse_json_object(data, what, limit=_MAX_CONFIG)
    inner = value.get("config") or {}
    rootfs = value.get("rootfs") or {}
    if not isinstance(inner, dict) or not isinstance(rootfs, dict):
        _bad(what, "config or rootfs is not an object")
    config = ImageConfig(
        env=_env(_texts(inner, "Env", what)),
        workdir=_text(inner, "WorkingDir", what),
        user=_text(inner, "User", what),
        entrypoint=_texts(inner, "Entrypoint", what),
        cmd=_texts(inner, "Cmd", what),
        architecture=_text(value, "architecture", what) or ARCHITECTURE,
        os=_text(value, "os", what) or "linux",
    )
    if (config.os, config.architecture) != ("linux", ARCHITECTURE):
        raise BuildError(
            f"{what} is for {config.os}/{config.architecture}; "
            f"smolbuild builds machines for linux/{ARCHITECTURE}",
            hint=f"use an image for linux/{ARCHITECTURE}",
            code="platform",
        )
    try:
        return config, tuple(parse_digest(text) for text in _texts(rootfs, "diff_ids", what))
    except ValueError as error:
        raise VerificationError(f"{what}: {error}", code="malformed") from error


def image_from_manifest(manifest: Manifest, open_blob: OpenBlob, *, what: str) -> LoadedImage:
    """Return the image of ``manifest``, with its configuration read and checked.

    Raises:
        VerificationError: the configuration does not have its digest or does not fit the manifest.
        BuildError: a blob is missing, or the platform is not ours.

    """
    with open_blob(manifest.config.digest) as region:
        data = region.read(limit=_MAX_CONFIG, what=f"the configuration of {what}")
        verify_region(region, manifest.config.digest, what=f"the configuration of {what}")
    config, diff_ids = parse_config(data, f"the configuration of {what}")
    if len(diff_ids) != len(manifest.layers) or len(diff_ids) > _MAX_LAYERS:
        _bad(what, f"{len(manifest.layers)} layers, but {len(diff_ids)} diff ids")
    layers = []
    for descriptor, diff_id in zip(manifest.layers, diff_ids, strict=True):
        layers.append(
            Layer(
                name=f"layer {descriptor.digest} of {what}",
                open=lambda digest=descriptor.digest: open_blob(digest),  # type: ignore[misc]
                digest=descriptor.digest,
                diff_id=diff_id,
            )
        )
    return LoadedImage(layers=tuple(layers), config=config, digest=manifest.descriptor.digest)


def merge(image: LoadedImage, work: Path, resources: contextlib.ExitStack, emit: Emit) -> Tree:
    """Return the merged file tree of ``image``; what it refers to stays open in ``resources``.

    Every layer's blob digest and diff id are checked before the first of its entries is looked at.

    Args:
        image: what to merge.
        work: directory for decompressed layers (unnamed files).
        resources: closes them.
        emit: receives one message per layer.

    Raises:
        VerificationError: a layer does not have its digest.
        BuildError: a layer is malformed or hostile; names the layer and the entry.
        HostError: no space in ``work``.

    """
    tree = Tree()
    for number, layer in enumerate(image.layers, 1):
        emit(Message(level="info", text=f"layer {number} of {len(image.layers)}"))
        region = resources.enter_context(layer.open())
        if layer.digest is not None:
            verify_region(region, layer.digest, what=layer.name)
        plain, found = resources.enter_context(unpacked(region, work, what=layer.name))
        if found is None:
            verify_region(plain, layer.diff_id, what=layer.name)
        elif found != layer.diff_id:
            raise VerificationError(
                f"{layer.name} unpacks to {found} instead of {layer.diff_id}",
                hint="the image is damaged or was tampered with: get it anew",
                code="digest-mismatch",
            )
        apply_layer(tree, plain, what=layer.name)
    return tree


def _env(entries: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if name:
            pairs[name] = value
    return tuple(pairs.items())


def _text(value: dict[str, object], key: str, what: str) -> str:
    text = value.get(key) or ""
    if not isinstance(text, str):
        _bad(what, f"{key} is not a string")
    return text


def _texts(value: dict[str, object], key: str, what: str) -> tuple[str, ...]:
    texts = value.get(key) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        _bad(what, f"{key} is not a list of strings")
    return tuple(texts)


def _bad(what: str, problem: str) -> NoReturn:
    raise VerificationError(f"{what}: {problem}", code="malformed")
