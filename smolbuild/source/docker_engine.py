"""The Docker engine's seam of this layer; ``docker_client`` is the real one."""

from collections.abc import Iterable, Mapping
from typing import IO, Protocol

from smolbuild.core.digest import Digest
from smolbuild.core.events import Emit
from smolbuild.core.values import dataclass
from smolbuild.model.lock import LockedRun

__all__ = ["NO_ENGINE", "DockerEngine", "EngineImage"]

NO_ENGINE = "docker-engine"
"""Code of the HostError that says that no engine answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImage:
    """An image in an engine: its ID and how it wants to be run."""

    id: Digest
    run: LockedRun


class DockerEngine(Protocol):
    """A Docker engine, found as the ``docker`` command finds it. Every call has a deadline.

    Raises:
        HostError: no engine answers, or this user may not use it (code ``NO_ENGINE``).
        BuildError: the engine refuses what is asked.

    """

    def image(self, name: str) -> EngineImage:
        """Return the image that ``name`` (or an ID) stands for now.

        Raises:
            UsageError: the engine has no such image (code ``missing-image``).
            BuildError: it is for another platform.

        """

    def save(self, image: Digest, into: IO[bytes], emit: Emit) -> None:
        """Write the image as an archive, as ``docker save`` does.

        Raises:
            UsageError: the engine has no such image.

        """

    def build(
        self,
        context: Iterable[bytes],
        *,
        dockerfile: str,
        target: str | None,
        args: Mapping[str, str],
        emit: Emit,
    ) -> EngineImage:
        """Build the Dockerfile in ``context``, a tar archive; its output goes to ``emit``.

        Raises:
            BuildError: an instruction failed; its output is in the details.

        """
