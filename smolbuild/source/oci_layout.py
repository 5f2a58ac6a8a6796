"""An image in an OCI layout (``image-layout.md``): a directory, or its files in an archive."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from smolbuild.core.digest import Digest, hex_of, parse_digest
from smolbuild.core.errors import BuildError, UsageError, VerificationError
from smolbuild.model.oci import MAX_MANIFEST_BYTES, Descriptor, Index, parse_index
from smolbuild.source.content import FileBacking, Region
from smolbuild.source.image import LoadedImage, image_from_manifest
from smolbuild.source.platform import choose_platform, platform_manifest

__all__ = ["OpenFile", "load_layout", "open_layout_directory"]

OpenFile = Callable[[str], contextlib.AbstractContextManager[Region]]
"""Opens a file of the layout by its name (``index.json``, ``blobs/sha256/…``)."""

_NAME = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"


def open_layout_directory(directory: Path) -> OpenFile:
    """Return the opener for the layout in ``directory``."""

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[Region]:
        try:
            backing = FileBacking(directory / name)
        except OSError as error:
            raise BuildError(
                f"cannot read {directory / name}: {error.strerror}",
                hint="the OCI layout is incomplete: write it anew",
            ) from error
        with backing:
            yield Region(backing, 0, backing.size)

    return opened


def load_layout(open_file: OpenFile, selector: str, *, what: str) -> LoadedImage:
    """Return the image that ``selector`` (a name, a digest, or nothing) names in a layout.

    Args:
        open_file: gives the layout's files.
        selector: an ``org.opencontainers.image.ref.name``, a digest, or ``""`` for the only image.
        what: the layout, for errors.

    Raises:
        UsageError: the selector names nothing, or is needed; lists the names there are.
        VerificationError: a manifest or configuration does not have its digest, or is malformed.
        BuildError: a file is missing, or no image is for our platform.

    """
    with open_file("index.json") as region:
        data = region.read(limit=MAX_MANIFEST_BYTES, what=f"index.json of {what}")
    index = parse_index(data, f"index.json of {what}")
    descriptor = _select(index, selector, what)

    def read(wanted: Descriptor) -> bytes:
        with open_file(_blob(wanted.digest)) as region:
            return region.read(limit=MAX_MANIFEST_BYTES, what=f"a manifest of {what}")

    manifest = platform_manifest(descriptor, read, what=what)
    return image_from_manifest(manifest, lambda digest: open_file(_blob(digest)), what=what)


def _blob(digest: Digest) -> str:
    return f"blobs/sha256/{hex_of(digest)}"


def _select(index: Index, selector: str, what: str) -> Descriptor:
    if not selector:
        if len(index.manifests) == 1:
            return index.manifests[0]
        names = {name for item in index.manifests for name in _names(item)}
        if len(names) > 1 or not index.manifests:
            raise UsageError(
                f"{what} holds {len(index.manifests)} images: say which",
                hint=f"append :NAME, one of {_listed(names)}" if names else "",
                code="image-selector",
            )
        return choose_platform(index.manifests, what=what)
    if selector.startswith("sha256:"):
        return _by_digest(index, selector, what)
    chosen = [item for item in index.manifests if selector in _names(item)]
    if not chosen:
        raise UsageError(
            f"{what} has no image named {selector!r}",
            hint=f"it has {_listed({n for item in index.manifests for n in _names(item)})}",
            code="image-selector",
        )
    return chosen[0] if len(chosen) == 1 else choose_platform(chosen, what=what)


def _by_digest(index: Index, selector: str, what: str) -> Descriptor:
    try:
        digest = parse_digest(selector)
    except ValueError as error:
        raise UsageError(f"{what}: {error}", code="image-selector") from error
    for item in index.manifests:
        if item.digest == digest:
            return item
    raise VerificationError(
        f"{what} has no image with the digest {digest}",
        hint=f"it has {_listed({str(item.digest) for item in index.manifests})}",
        code="digest-mismatch",
    )


def _names(descriptor: Descriptor) -> set[str]:
    """Return what an image may be called: its name, and the tag at the end of a full one."""
    names = set()
    for key in (_NAME, _CONTAINERD_NAME):
        name = descriptor.annotations.get(key)
        if name:
            names.add(name)
            if "/" in name and ":" in name.rpartition("/")[2]:
                names.add(name.rpartition(":")[2])
    return names


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:20]
    return ", ".join(shown) if shown else "no named image"
