"""The local store: an OCI image layout that skopeo and oras read as it is.

``oci-layout``, ``index.json`` and ``blobs/sha256/<hex>`` follow image-spec v1.1 "image-layout". A
name is an ``index.json`` entry with ``org.opencontainers.image.ref.name``. Referrers (signatures,
attestations) stand in an index named by the fallback tag ``sha256-<hex of the subject>``, as on a
registry without the referrers API. An artifact's provenance key is the name ``key-<hex>``, and
``last-<name>`` the last build of a name; users' own names always carry a tag or a digest.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes, hex_of, parse_digest
from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.core.files import (
    atomic_file,
    file_lock,
    private_directory,
    sweep_temporaries,
    write_atomic,
)
from smolbuild.model.oci import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    Descriptor,
    Index,
    encode_json,
    fallback_tag,
    parse_index,
    parse_manifest,
)

__all__ = ["Ingest", "Store", "is_fallback_tag", "is_internal", "key_name", "last_name"]

REF_NAME = "org.opencontainers.image.ref.name"
_LOCK_SECONDS = 60.0


def key_name(key: Digest) -> str:
    """Return the name under which an artifact is found by its provenance key."""
    return f"key-{hex_of(key)}"


def last_name(name: str) -> str:
    """Return the name under which the last build of ``name`` is found, to explain the next one."""
    return "last-" + name.replace("/", "--").replace(":", "--")


def is_fallback_tag(name: str) -> bool:
    """Return whether ``name`` stands for an index of referrers (see ``fallback_tag``)."""
    return name.startswith("sha256-") and is_internal(name)


def is_internal(name: str) -> bool:
    """Return whether ``name`` is bookkeeping: users' names carry a tag or digest, so a colon."""
    return ":" not in name


class Ingest:
    """Receives the bytes of one blob; checks length and digest as they come."""

    def __init__(self, expected: Descriptor, descriptor: int) -> None:
        self._expected = expected
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self._length = 0

    def __call__(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            VerificationError: more bytes came than the descriptor announces.

        """
        self._length += len(data)
        if self._length > self._expected.size:
            raise VerificationError(
                f"blob {self._expected.digest} is longer than the {self._expected.size:,} bytes "
                "its descriptor announces",
                code="length",
            )
        self._hash.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def check(self) -> None:
        """Check that the blob is complete.

        Raises:
            VerificationError: length or digest differ from the descriptor.

        """
        if self._length != self._expected.size:
            raise VerificationError(
                f"blob {self._expected.digest} has {self._length:,} bytes, "
                f"its descriptor announces {self._expected.size:,}",
                code="length",
            )
        actual = "sha256:" + self._hash.hexdigest()
        if actual != self._expected.digest:
            raise VerificationError(
                f"blob {self._expected.digest} has the digest {actual}", code="digest"
            )


class Store:
    """An OCI image layout in ``root``, created on first use. Safe for many processes at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._blobs = root / "blobs" / "sha256"
        self._index = root / "index.json"
        if not (root / "oci-layout").exists():
            private_directory(self._blobs)
            write_atomic(root / "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')

    # ---- blobs

    def path(self, digest: Digest) -> Path:
        """Return where the blob ``digest`` is or would be."""
        return self._blobs / hex_of(digest)

    def has(self, digest: Digest, size: int | None = None) -> bool:
        """Return whether the blob is there (and has ``size`` bytes, where given)."""
        try:
            actual = self.path(digest).stat().st_size
        except FileNotFoundError:
            return False
        return size is None or actual == size

    def add_bytes(self, data: bytes) -> Digest:
        """Store ``data`` durably and return its digest. Idempotent."""
        digest = digest_bytes(data)
        if not self.has(digest, len(data)):
            write_atomic(self.path(digest), data)
        return digest

    @contextlib.contextmanager
    def ingest(self, expected: Descriptor) -> Iterator[Ingest]:
        """Receive a blob; it becomes visible only when complete and right. Idempotent.

        Raises:
            VerificationError: length or digest are wrong; nothing is stored.

        """
        with atomic_file(self.path(expected.digest)) as stream:
            receive = Ingest(expected, stream.fileno())
            yield receive
            receive.check()

    def read(self, digest: Digest, *, limit: int = MAX_MANIFEST_BYTES) -> bytes:
        """Return the bytes of a small blob, digest checked.

        Raises:
            VerificationError: it is missing, larger than ``limit``, or damaged.

        """
        try:
            with self.path(digest).open("rb") as stream:
                data = stream.read(limit + 1)
        except FileNotFoundError as error:
            raise VerificationError(
                f"the local store lacks blob {digest}",
                hint="pull or build the artifact again",
                code="missing-blob",
            ) from error
        if len(data) > limit:
            raise VerificationError(f"blob {digest} has more than the {limit:,} bytes allowed")
        if digest_bytes(data) != digest:
            raise VerificationError(
                f"blob {digest} in the local store is damaged",
                hint="remove the artifact with `smolbuild rm`, then pull or build it again",
                code="digest",
            )
        return data

    def blobs(self) -> Iterator[Digest]:
        """Yield every blob in the store."""
        for entry in os.scandir(self._blobs):
            with contextlib.suppress(ValueError):
                yield parse_digest(f"sha256:{entry.name}")

    def sweep(self, *, older_than: float) -> int:
        """Remove blobs that were being written when their process was killed; return how many."""
        return sweep_temporaries(self._blobs, older_than=older_than)

    def remove_blob(self, digest: Digest) -> int:
        """Remove a blob and return the bytes freed. Idempotent."""
        try:
            size = self.path(digest).stat().st_size
            self.path(digest).unlink()
        except FileNotFoundError:
            return 0
        return size

    # ---- names

    def index(self) -> Index:
        """Return the names as they are now.

        Raises:
            VerificationError: ``index.json`` is damaged.

        """
        try:
            data = self._index.read_bytes()
        except FileNotFoundError:
            data = encode_json(_index_json(()))
        try:
            return parse_index(data, str(self._index))
        except VerificationError as error:
            raise VerificationError(
                error.message,
                hint=f"move {self.root} away, then build or pull again; its blobs are intact and "
                "count as soon as an index.json names them",
                code=error.code,
            ) from error

    def names(self) -> dict[str, Descriptor]:
        """Return every name with its descriptor, in the order they were given."""
        return {
            entry.annotations[REF_NAME]: entry
            for entry in self.index().manifests
            if REF_NAME in entry.annotations
        }

    def find(self, name: str) -> Descriptor | None:
        """Return what ``name`` stands for, or None."""
        return self.names().get(name)

    def resolve(self, text: str) -> Descriptor:
        """Return the artifact that ``text`` names: ``name:tag``, ``name`` (latest) or a digest.

        A digest may be given as ``sha256:…``, as ``anything@sha256:…`` or as a unique prefix of at
        least 7 hex digits.

        Raises:
            UsageError: nothing or more than one artifact fits; names what is there.

        """
        names = self.names()
        for candidate in (text, f"{text}:latest"):
            if candidate in names:
                return names[candidate]
        wanted = text.rpartition("@")[2].removeprefix("sha256:")
        if len(wanted) >= 7 and set(wanted) <= set("0123456789abcdef"):
            found = {
                entry.digest: entry
                for name, entry in names.items()
                if hex_of(entry.digest).startswith(wanted) and not is_fallback_tag(name)
            }
            if len(found) == 1:
                return next(iter(found.values()))
            if found:
                raise UsageError(f"{text} fits {len(found)} artifacts", hint="give more digits")
        known = ", ".join(name for name in names if not is_internal(name))
        raise UsageError(
            f"there is no artifact {text} in the local store",
            hint=f"known: {known}" if known else "build one with `smolbuild build`, or pull it",
            code="not-found",
        )

    def name(self, descriptor: Descriptor, *names: str) -> None:
        """Let each of ``names`` stand for ``descriptor`` from now on, in one step. Idempotent."""
        with self._changing() as entries:
            for name in names:
                entries.pop(name, None)
                entries[name] = Descriptor(
                    media_type=descriptor.media_type,
                    digest=descriptor.digest,
                    size=descriptor.size,
                    annotations={REF_NAME: name},
                )

    def unname(self, *names: str) -> None:
        """Forget ``names``; unknown ones are fine. Idempotent."""
        with self._changing() as entries:
            for name in names:
                entries.pop(name, None)

    # ---- referrers

    def attach(self, manifest: bytes) -> Descriptor:
        """Store a referrer manifest (its blobs are there already) and list it under its subject.

        Idempotent.

        Raises:
            VerificationError: the manifest has no subject.

        """
        parsed = parse_manifest(manifest, "referrer")
        if parsed.subject is None:
            raise VerificationError("a referrer manifest needs a subject")
        self.add_bytes(manifest)
        entry = Descriptor(
            media_type=MANIFEST_TYPE,
            digest=parsed.descriptor.digest,
            size=parsed.descriptor.size,
            artifact_type=parsed.artifact_type or parsed.config.media_type,
            annotations=parsed.annotations,
        )
        with self.lock():
            known = self.referrers(parsed.subject.digest)
            if any(item.digest == entry.digest for item in known):
                return entry
            index = encode_json(_index_json((*known, entry)))
            self.add_bytes(index)
            with self._changing(locked=True) as entries:
                tag = fallback_tag(parsed.subject.digest)
                entries[tag] = Descriptor(
                    media_type=INDEX_TYPE,
                    digest=digest_bytes(index),
                    size=len(index),
                    annotations={REF_NAME: tag},
                )
        return entry

    def referrers(self, subject: Digest) -> tuple[Descriptor, ...]:
        """Return the descriptors of what refers to ``subject``."""
        found = self.find(fallback_tag(subject))
        return parse_index(self.read(found.digest)).manifests if found else ()

    # ---- locking

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock under which ``index.json`` changes."""
        return file_lock(self.root / ".index.lock", timeout=_LOCK_SECONDS, what="the local store")

    def lease(self) -> contextlib.AbstractContextManager[None]:
        """Keep blobs that nothing refers to yet from being collected, while in the block."""
        return file_lock(
            self.root / ".collect.lock", timeout=_LOCK_SECONDS, what="the local store", shared=True
        )

    def exclusive(self, timeout: float = _LOCK_SECONDS) -> contextlib.AbstractContextManager[None]:
        """Wait until nobody holds a lease; nobody gets one in the block."""
        return file_lock(self.root / ".collect.lock", timeout=timeout, what="the local store")

    @contextlib.contextmanager
    def _changing(self, *, locked: bool = False) -> Iterator[dict[str, Descriptor]]:
        with contextlib.nullcontext() if locked else self.lock():
            entries = self.names()
            before = dict(entries)
            yield entries
            if entries != before or not self._index.exists():
                write_atomic(self._index, encode_json(_index_json(tuple(entries.values()))))


def _index_json(entries: tuple[Descriptor, ...]) -> dict[str, object]:
    return {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [entry.to_json() for entry in entries],
    }
