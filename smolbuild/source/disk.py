"""A raw disk image as a value, and its digest without reading its holes."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.files import data_extents

__all__ = ["DiskImage", "digest_disk"]

_GRAIN = 1 << 20
_DOMAIN = b"smolbuild.disk.v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskImage:
    """A raw, sparse image of ``size`` bytes; ``digest`` is ``digest_disk`` of it."""

    path: Path
    size: int
    digest: Digest


def digest_disk(path: Path) -> Digest:
    """Return the digest of a raw image: its size and every MiB of it that is not all zeros.

    The same bytes give the same digest however sparse the file is. Reads data only, not holes.

    Raises:
        OSError: the file cannot be read.

    """
    zeros = bytes(_GRAIN)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        hasher = hashlib.sha256(_DOMAIN + size.to_bytes(8, "big"))
        for index in _data_grains(file.fileno()):
            data = os.pread(file.fileno(), _GRAIN, index * _GRAIN)
            if data != zeros[: len(data)]:
                hasher.update(index.to_bytes(8, "big"))
                hasher.update(data)
    return Digest("sha256:" + hasher.hexdigest())


def _data_grains(descriptor: int) -> Iterator[int]:
    """Yield the numbers of the grains that may hold data, in order."""
    following = 0
    for start, end in data_extents(descriptor):
        first, last = max(following, start // _GRAIN), -(-end // _GRAIN)
        yield from range(first, last)
        following = max(following, last)
