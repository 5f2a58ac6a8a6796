"""The registry seam of this layer: ``registry.images`` implements it."""

from typing import IO, Protocol

from smolbuild.core.digest import Digest
from smolbuild.model.oci import Descriptor

__all__ = ["ImageFetcher"]


class ImageFetcher(Protocol):
    """Reads from the registry that ``reference`` names. Every call has deadlines of its own.

    Raises:
        RegistryError: the registry or the network failed after bounded retries.

    """

    def resolve(self, reference: str) -> Descriptor:
        """Return the descriptor of the manifest or index that ``reference`` names now."""

    def manifest(self, reference: str, digest: Digest) -> bytes:
        """Return the raw bytes of a manifest or index of the same repository."""

    def blob(self, reference: str, descriptor: Descriptor, into: IO[bytes]) -> None:
        """Write a blob of the same repository to ``into``, streamed."""
