"""An image in a registry: resolved to digests for the lock, pulled into a cache by digest.

The transport is behind ``ImageFetcher``. Whatever it delivers is checked here again: a blob enters
the cache only under the digest it has.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.core.files import atomic_file, private_directory, require_space, write_atomic
from smolbuild.model.lock import LockedImage
from smolbuild.model.oci import MAX_MANIFEST_BYTES, Descriptor, Manifest, parse_manifest
from smolbuild.source.content import FileBacking, Region
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.source.image import LoadedImage, image_from_manifest
from smolbuild.source.platform import all_platforms, platform_manifest

__all__ = ["load_registry_image", "pull_layers", "resolve_image"]


def resolve_image(reference: str, fetcher: ImageFetcher) -> LockedImage:
    """Return what ``reference`` stands for now, down to the manifest for our platform.

    Raises:
        RegistryError: as the fetcher.
        VerificationError: a manifest does not have its digest.
        BuildError: there is no image for our platform.

    """
    descriptor = fetcher.resolve(reference)
    read = functools.cache(lambda digest: fetcher.manifest(reference, digest))
    manifest = platform_manifest(descriptor, lambda wanted: read(wanted.digest), what=reference)
    is_index = manifest.descriptor.digest != descriptor.digest
    return LockedImage(
        reference=reference,
        digest=descriptor.digest,
        platform_digest=manifest.descriptor.digest,
        platforms=all_platforms(read(descriptor.digest), what=reference) if is_index else (),
    )


def load_registry_image(locked: LockedImage, cache: Path, fetcher: ImageFetcher) -> LoadedImage:
    """Return the locked image with manifest and configuration; layers are fetched when opened.

    Idempotent; what is in ``cache`` is not fetched again.

    Raises:
        RegistryError: as the fetcher.
        VerificationError: something does not have its digest.

    """
    blobs = _Blobs(locked=locked, directory=private_directory(cache / "blobs"), fetcher=fetcher)
    manifest = blobs.manifest()
    sizes = {item.digest: item for item in (manifest.config, *manifest.layers)}
    return image_from_manifest(
        manifest, lambda digest: blobs.open(sizes[digest]), what=locked.reference
    )


def pull_layers(image: LoadedImage) -> None:
    """Bring every layer of ``image`` into the cache, so that merging needs no network. Idempotent.

    Raises:
        RegistryError, VerificationError: as opening a layer.

    """
    for layer in image.layers:
        with layer.open():
            pass  # opening fetches it, and says how far that is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blobs:
    """Blobs of one image by digest: from the cache, else fetched into it."""

    locked: LockedImage
    directory: Path
    fetcher: ImageFetcher

    def manifest(self) -> Manifest:
        digest = self.locked.platform_digest
        path = self.directory / hex_of(digest)
        if path.is_file():
            data = path.read_bytes()
        else:
            data = self.fetcher.manifest(self.locked.reference, digest)
        if len(data) > MAX_MANIFEST_BYTES or digest_bytes(data) != digest:
            path.unlink(missing_ok=True)
            raise self._mismatch(digest)
        if not path.is_file():
            write_atomic(path, data)
        return parse_manifest(data, self.locked.reference)

    @contextlib.contextmanager
    def open(self, descriptor: Descriptor) -> Iterator[Region]:
        path = self.directory / hex_of(descriptor.digest)
        if not path.is_file():
            self._fetch(descriptor, path)
        with FileBacking(path) as backing:
            yield Region(backing, 0, backing.size)

    def _fetch(self, descriptor: Descriptor, path: Path) -> None:
        require_space(self.directory, descriptor.size, what=f"pulling {self.locked.reference}")
        with atomic_file(path) as file:
            hashed = _Hashed(file, descriptor.size)
            self.fetcher.blob(self.locked.reference, descriptor, cast("IO[bytes]", hashed))
            if hashed.digest() != descriptor.digest or hashed.size != descriptor.size:
                raise self._mismatch(descriptor.digest)

    def _mismatch(self, digest: Digest) -> VerificationError:
        return VerificationError(
            f"{self.locked.reference}: {digest} came with other bytes than its digest says",
            hint="try again; if it stays so, the registry or the cache is damaged or tampered with",
            code="digest-mismatch",
        )


class _Hashed:
    """A write-only stream that hashes what passes, and takes no more than it was promised."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file, self._limit, self._hasher = file, limit, hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.size += len(data)
        if self.size > self._limit:
            raise VerificationError(
                f"a blob has more than the {self._limit:,} bytes its descriptor says",
                code="digest-mismatch",
            )
        self._hasher.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> Digest:
        return Digest("sha256:" + self._hasher.hexdigest())
