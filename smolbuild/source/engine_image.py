"""Bases that a Docker engine holds or makes: what they are now, and their content."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.errors import HostError, UsageError
from smolbuild.core.events import Emit, Message
from smolbuild.model.lock import LockedDockerfile, LockedImage, LockedRun
from smolbuild.model.smolfile import Dockerfile
from smolbuild.source.archive import load_saved
from smolbuild.source.docker_context import DockerContext
from smolbuild.source.docker_engine import NO_ENGINE, DockerEngine
from smolbuild.source.image import LoadedImage

__all__ = ["build_dockerfile", "engine_has", "held_now", "lock_held", "open_saved"]


def lock_held(reference: str, name: str, docker: DockerEngine) -> LockedImage:
    """Return what the image ``name`` of the engine is now, for the lock.

    Raises:
        UsageError, HostError: the engine has none, or does not answer.

    """
    found = docker.image(name)
    return LockedImage(
        reference=reference, digest=found.id, platform_digest=found.id, run=found.run
    )


def held_now(
    name: str, locked: LockedImage | None, docker: DockerEngine
) -> tuple[Digest, LockedRun]:
    """Return the ID and run configuration of an image in the engine.

    Where no engine answers, what the lock says counts: its disk may be cached.

    Raises:
        UsageError: the engine has no such image.
        HostError: no engine answers, and the lock does not know the image either.

    """
    try:
        found = docker.image(name)
    except HostError as error:
        if error.code != NO_ENGINE or locked is None or locked.run is None:
            raise
        return locked.platform_digest, locked.run
    return found.id, found.run


def engine_has(image: Digest, docker: DockerEngine) -> bool:
    """Return whether the engine has the image with this ID.

    Raises:
        HostError: no engine answers.

    """
    try:
        docker.image(image)
    except UsageError:
        return False
    return True


def build_dockerfile(
    base: Dockerfile, context: DockerContext, docker: DockerEngine, emit: Emit
) -> LockedDockerfile:
    """Build the Dockerfile and return what it gave, for the lock.

    Raises:
        HostError: no engine answers.
        BuildError: an instruction failed, or a file of the context changed meanwhile.

    """
    emit(Message(level="info", text=f"the Docker engine builds {base.dockerfile}"))
    found = docker.build(
        context.tar(),
        dockerfile=context.dockerfile,
        target=base.target,
        args=dict(base.args),
        emit=emit,
    )
    return LockedDockerfile(
        dockerfile=base.dockerfile,
        target=base.target,
        args=base.args,
        context=base.context,
        context_digest=context.digest,
        image=found.id,
        run=found.run,
    )


@contextlib.contextmanager
def open_saved(
    image: Digest, docker: DockerEngine, work: Path, emit: Emit
) -> Iterator[LoadedImage]:
    """Give the image with this ID, read from the engine into a nameless file in ``work``.

    Raises:
        UsageError, HostError: the engine has none, or does not answer.
        VerificationError: what it saved is not that image.

    """
    with tempfile.NamedTemporaryFile(dir=work, prefix=".tmp-saved-") as file:
        docker.save(image, file, emit)
        file.flush()
        with load_saved(Path(file.name), image) as loaded:
            yield loaded
