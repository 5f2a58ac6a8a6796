"""SHA-256 digests in OCI notation (``sha256:<64 hex>``)."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NewType

from smolbuild.core.canon import Json, canonical_json

__all__ = [
    "Digest",
    "digest_bytes",
    "digest_chunks",
    "digest_file",
    "digest_value",
    "hex_of",
    "parse_digest",
]

Digest = NewType("Digest", str)
"""A digest in OCI notation, always ``sha256:`` and 64 lower-case hex digits."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_READ = 1 << 20


def parse_digest(text: str) -> Digest:
    """Return ``text`` as a digest.

    Raises:
        ValueError: it is not ``sha256:`` followed by 64 lower-case hex digits.

    """
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"not a sha256 digest: {text[:90]!r}")
    return Digest(text)


def hex_of(digest: Digest) -> str:
    """Return the 64 hex digits of ``digest``."""
    return digest.removeprefix("sha256:")


def digest_bytes(data: bytes | bytearray | memoryview) -> Digest:
    """Return the digest of ``data``."""
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def digest_chunks(chunks: Iterable[bytes]) -> Digest:
    """Return the digest of the concatenation of ``chunks``, read once."""
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return Digest("sha256:" + hasher.hexdigest())


def digest_file(path: Path) -> Digest:
    """Return the digest of the file's content, reading 1 MiB at a time.

    Raises:
        OSError: the file cannot be read.

    """
    with path.open("rb") as stream:
        return digest_chunks(iter(lambda: stream.read(_READ), b""))


def digest_value(domain: str, value: Json) -> Digest:
    """Return the domain-separated digest of a JSON value: SHA-256(domain, NUL, canonical JSON).

    ``domain`` carries a version (``smolbuild.key.leaf.v1``), so that values of different kinds or
    of different format versions can never collide.
    """
    return digest_bytes(domain.encode() + b"\0" + canonical_json(value))
