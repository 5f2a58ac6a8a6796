"""Read, resolve and write ``Smolfile.lock``."""

import dataclasses
from pathlib import Path
from typing import Literal

from smolbuild.build.context import BuildContext
from smolbuild.core.errors import SmolbuildError, UsageError
from smolbuild.core.events import Message
from smolbuild.core.files import write_atomic
from smolbuild.core.values import dataclass
from smolbuild.model.lock import Lock, LockedDockerfile, LockedRun, lock_path, matches
from smolbuild.model.lock_file import encode_lock, parse_lock
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.base_identity import BaseIdentity, has_local_base

__all__ = [
    "LockState",
    "follow_base",
    "follow_dockerfile",
    "obtain_lock",
    "renew_lock",
    "replace_dockerfile",
    "resolve_lock",
    "update_lock",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockState:
    """The lock in force and how it came to be."""

    lock: Lock
    state: Literal["locked", "created", "updated"]
    reasons: tuple[str, ...] = ()
    """Why an existing lock did not fit the Smolfile."""
    is_new: bool = False
    """Whether nothing that fits the Smolfile was locked before."""


def obtain_lock(context: BuildContext, smolfile: Smolfile, *, locked: bool) -> LockState:
    """Return the Smolfile's lock; make or renew it when it is missing or does not fit.

    Args:
        context: the world.
        smolfile: what is to be built.
        locked: demand that the lock exists and fits; nothing is resolved or written then.

    Raises:
        UsageError: ``locked``, and the lock is missing or does not fit; or the lock is malformed.
        RegistryError, HostError: an input could not be resolved.

    """
    path = lock_path(smolfile.path)
    try:
        lock = parse_lock(_read(path), file=path.name)
    except FileNotFoundError as error:
        if locked:
            raise UsageError(
                f"--locked: there is no {path.name} beside {smolfile.path.name}",
                hint="run `smolbuild lock` and commit the file",
                code="lock-missing",
            ) from error
        return LockState(lock=_write(context, smolfile), state="created", is_new=True)
    reasons = matches(lock, smolfile)
    if not reasons:
        return LockState(lock=lock, state="locked")
    if locked:
        raise UsageError(
            f"--locked: {path.name} does not fit the Smolfile: {'; '.join(reasons)}",
            hint="run `smolbuild lock --update` and commit the file",
            code="lock-mismatch",
        )
    context.emit(Message(level="info", text=f"{path.name} is renewed: {'; '.join(reasons)}"))
    made = _write(context, smolfile)
    return LockState(lock=made, state="updated", reasons=reasons, is_new=True)


def follow_base(
    context: BuildContext, smolfile: Smolfile, state: LockState, base: BaseIdentity, *, locked: bool
) -> LockState:
    """Bring the lock up to date with a local image or directory whose content changed.

    An image in a Docker engine is local too.

    What the lock says of a registry or Debian base is what is built; a local base is what it is.

    Raises:
        UsageError: ``locked``, and the local base is not the locked one.

    """
    image = state.lock.image
    if image is None or image.platform_digest == base.digest:
        return state
    reason = f"{image.reference} changed: {image.platform_digest} -> {base.digest}"
    _refuse_when(locked, smolfile, reason)
    moved = dataclasses.replace(
        image,
        digest=base.digest,
        platform_digest=base.digest,
        run=None if image.run is None else _run(base),
    )
    lock = dataclasses.replace(state.lock, image=moved)
    renewed = renew_lock(context, smolfile, lock, (reason,))
    return dataclasses.replace(renewed, is_new=state.is_new)


def _run(base: BaseIdentity) -> LockedRun:
    config = base.config
    return LockedRun(
        env=config.env,
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        workdir=config.workdir,
        user=config.user,
    )


def _refuse_when(locked: bool, smolfile: Smolfile, reason: str) -> None:
    if locked:
        raise UsageError(
            f"--locked: {lock_path(smolfile.path).name} does not fit: {reason}",
            hint="run `smolbuild lock --update` and commit the file",
            code="lock-mismatch",
        )


def follow_dockerfile(
    context: BuildContext, smolfile: Smolfile, state: LockState, *, locked: bool
) -> LockState:
    """Build a Dockerfile anew when what it is built from changed, and bring the lock up to date.

    An unchanged one is the locked image, and no engine is asked.

    Raises:
        UsageError: ``locked``, and it changed; or the Dockerfile or its context is missing.
        HostError, BuildError: it cannot be built.

    """
    old = state.lock.dockerfile
    if not isinstance(smolfile.base, Dockerfile) or old is None or state.is_new:
        return state
    from smolbuild.source.docker_context import collect_context

    files = collect_context(smolfile, smolfile.base, cache=context.home.cache)
    if files.digest == old.context_digest:
        return state
    reason = f"what {old.dockerfile} is built from changed"
    _refuse_when(locked, smolfile, reason)
    from smolbuild.source.engine_image import build_dockerfile

    built = build_dockerfile(smolfile.base, files, context.docker, context.emit)
    return replace_dockerfile(context, smolfile, state, built, reason)


def replace_dockerfile(
    context: BuildContext,
    smolfile: Smolfile,
    state: LockState,
    built: LockedDockerfile,
    reason: str,
) -> LockState:
    """Write what a Dockerfile gave now into the lock."""
    lock = dataclasses.replace(state.lock, dockerfile=built)
    renewed = renew_lock(context, smolfile, lock, (reason,))
    return dataclasses.replace(renewed, is_new=state.is_new)


def renew_lock(
    context: BuildContext, smolfile: Smolfile, lock: Lock, reasons: tuple[str, ...]
) -> LockState:
    """Write ``lock`` in place of the Smolfile's, and say why.

    Raises:
        SmolbuildError: it cannot be written; the old lock stays.

    """
    path = lock_path(smolfile.path)
    context.emit(Message(level="info", text=f"{path.name} is renewed: {'; '.join(reasons)}"))
    _store(path, lock)
    return LockState(lock=lock, state="updated", reasons=reasons)


def update_lock(context: BuildContext, smolfile: Smolfile) -> LockState:
    """Resolve every input anew and write the lock.

    Raises:
        RegistryError, HostError: an input could not be resolved; the old lock stays.

    """
    existed = lock_path(smolfile.path).exists()
    return LockState(lock=_write(context, smolfile), state="updated" if existed else "created")


def resolve_lock(context: BuildContext, smolfile: Smolfile, *, local: bool = True) -> Lock:
    """Return what the Smolfile's base and kernel stand for now. Writes nothing.

    Without ``local`` an image on this host is left out: it is what it is, no name stands for it.

    Raises:
        UsageError: there is no base, or a local one does not exist.
        RegistryError, HostError, BuildError, VerificationError: an input cannot be resolved.

    """
    # A lock that fits is the common case, and needs neither of these.
    from smolbuild.source.base_lock import LockedBase, resolve_base
    from smolbuild.source.kernel_package import resolve_kernel

    if local or not has_local_base(smolfile):
        base = resolve_base(
            smolfile,
            cache=context.home.cache,
            fetcher=context.fetcher,
            docker=context.docker,
            emit=context.emit,
        )
    else:
        base = LockedBase()
    kernel = None if smolfile.kernel else resolve_kernel()
    return Lock(image=base.image, debian=base.debian, dockerfile=base.dockerfile, kernel=kernel)


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a FIFO would be waited for, for ever
        raise UsageError(
            f"{path} is not a regular file",
            hint="move it away; `smolbuild lock` writes the lock there",
            code="lock-malformed",
        )
    return path.read_bytes()


def _write(context: BuildContext, smolfile: Smolfile) -> Lock:
    lock = resolve_lock(context, smolfile)
    _store(lock_path(smolfile.path), lock)
    return lock


def _store(path: Path, lock: Lock) -> None:
    try:
        write_atomic(path, encode_lock(lock), mode=0o644)
    except OSError as error:
        raise SmolbuildError(
            f"cannot write {path}: {error.strerror}",
            hint="the lock belongs beside the Smolfile; make the directory writable",
            code="lock-write",
        ) from error
