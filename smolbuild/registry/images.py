"""Base images from registries: the fetcher of the source layer (``source.fetcher``)."""

from collections.abc import Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from smolbuild.core.digest import Digest
from smolbuild.core.errors import RegistryError
from smolbuild.core.events import Emit, Transfer, silent
from smolbuild.model.oci import Descriptor
from smolbuild.model.reference import parse_reference

if TYPE_CHECKING:
    from smolbuild.registry.client import RegistryClient

__all__ = ["RegistryImages"]

_EVENT_BYTES = 1024 * 1024


class RegistryImages:
    """Resolves and pulls images by reference, with one client per registry; close it after use.

    Args:
        environment: names Docker's configuration and the CA bundle (see ``client.connect``).
        emit: receives the progress of blobs.

    """

    def __init__(self, environment: Mapping[str, str], *, emit: Emit = silent) -> None:
        self._environment = environment
        self._emit = emit
        self._clients: dict[str, RegistryClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def resolve(self, reference: str) -> Descriptor:
        """Return the descriptor of the manifest or index that ``reference`` names now.

        Raises:
            UsageError: the reference is malformed.
            RegistryError: there is no such image, or the registry fails or refuses.
            VerificationError: the registry answers a digest with another one.

        """
        parsed = parse_reference(reference)
        found = self._client(parsed.registry).head_manifest(parsed)
        if found is None:
            raise RegistryError(
                f"{parsed.registry} has no image {reference}",
                hint="check the name and the tag; for a private repository, `docker login` first",
                code="not-found",
            )
        return found

    def manifest(self, reference: str, digest: Digest) -> bytes:
        """Return the verified bytes of a manifest or index of the repository of ``reference``."""
        parsed = parse_reference(reference)
        return self._client(parsed.registry).get_manifest(parsed.repository, digest)[0]

    def blob(self, reference: str, descriptor: Descriptor, into: IO[bytes]) -> None:
        """Stream a blob of the repository of ``reference`` into a file; verified on return."""
        parsed = parse_reference(reference)
        said = 0

        def progress(done: int) -> None:
            nonlocal said
            if done == descriptor.size or done >= said + _EVENT_BYTES:
                said = done
                self._emit(Transfer(what=reference, done=done, total=descriptor.size))

        self._client(parsed.registry).pull_blob(parsed.repository, descriptor, into, progress)

    def _client(self, registry: str) -> "RegistryClient":
        if registry not in self._clients:
            from smolbuild.registry.client import connect

            self._clients[registry] = connect(registry, self._environment, emit=self._emit)
        return self._clients[registry]
