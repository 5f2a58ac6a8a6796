"""Where the local store keeps the signatures of its artifacts."""

from collections.abc import Sequence

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import Descriptor
from smolbuild.store.layout import Store

__all__ = ["StoreEvidence"]


class StoreEvidence:
    """Finds signatures in the local store (see ``trust.verify.Evidence``)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        """Return what the store lists as referring to ``subject``."""
        return self._store.referrers(subject)

    def manifest(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a manifest."""
        return self._read(descriptor)

    def blob(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a blob."""
        return self._read(descriptor)

    def _read(self, descriptor: Descriptor) -> bytes:
        if not self._store.has(descriptor.digest):
            raise VerificationError(f"{descriptor.digest} is not in the store", code="missing")
        return self._store.read(descriptor.digest)
