"""Base drift: whether tag, suite and kernel package still name what the lock says.

The answer needs the network, so it is asked only where ``[smolbuild.policy] on_base_drift`` wants
it, and remembered for an hour in ``Home.cache/drift`` under what was asked for: reference, suite
and packages. What is remembered is what they named, not whether that differs from some lock.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from smolbuild.build.context import BuildContext
from smolbuild.build.lockfile import LockState, renew_lock, resolve_lock
from smolbuild.core.codec import encode
from smolbuild.core.digest import digest_value, hex_of
from smolbuild.core.errors import BuildError, RegistryError, SmolbuildError, UsageError
from smolbuild.core.events import Message
from smolbuild.core.files import private_directory, write_atomic
from smolbuild.model.lock import Lock
from smolbuild.model.lock_changes import lock_changes
from smolbuild.model.lock_file import encode_lock, parse_lock
from smolbuild.model.smolfile import Smolfile
from smolbuild.source.base_identity import has_local_base

__all__ = ["Drift", "heed_drift"]

_REMEMBERED = 3600.0
_FAILURE_REMEMBERED = 600.0
_NOT_KNOWN = "whether the base drifted is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What is known of the drift of a lock, and since when."""

    checked: float
    """Seconds since 1970."""
    changes: tuple[str, ...] = ()
    problem: str = ""
    """Why it is not known; empty when it is."""

    @property
    def state(self) -> str:
        """``none``, ``drifted`` or ``unknown``."""
        return "unknown" if self.problem else "drifted" if self.changes else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    checked: float
    lock: Lock | None
    problem: str = ""


def heed_drift(
    context: BuildContext, smolfile: Smolfile, state: LockState, *, locked: bool, force: bool
) -> tuple[LockState, Drift | None]:
    """Apply the policy ``on_base_drift`` to a lock; without one nothing is asked.

    Args:
        context: the world.
        smolfile: what is to be built.
        state: its lock. One that was made just now cannot have drifted.
        locked: the lock may not be renewed: ``rebuild`` only warns then.
        force: ask now, whatever is remembered, and even without a policy.

    Returns:
        The lock in force, and what is known of its drift; None: nobody asked.

    Raises:
        BuildError: code ``base-drift``: it drifted, and the policy is ``fail``.
        RegistryError: code ``base-drift-unknown``: the policy is ``fail``, and nobody could say.
        UsageError: there is no base.

    """
    policy = smolfile.policy.on_base_drift
    if policy is None and not force:
        return state, None
    path = _memory(context, smolfile)
    if state.state != "locked":
        _remember(
            path,
            _Found(
                checked=context.now(),
                lock=replace(state.lock, image=None, dockerfile=None)
                if has_local_base(smolfile)
                else state.lock,
            ),
        )
        return state, Drift(checked=context.now())
    found = _look(context, smolfile, path, patient=force or policy == "fail", force=force)
    if found.lock is None:
        if policy == "fail":
            raise RegistryError(
                f"{_NOT_KNOWN}: {found.problem}",
                hint='try again, or set on_base_drift = "warn" to build without knowing',
                code="base-drift-unknown",
            )
        context.emit(Message(level="warning", text=f"{_NOT_KNOWN}: {found.problem}"))
        return state, Drift(checked=found.checked, problem=found.problem)
    drift = Drift(checked=found.checked, changes=lock_changes(state.lock, found.lock))
    if not drift.changes:
        return state, drift
    if policy == "fail":
        raise BuildError(
            f"the base drifted: {'; '.join(drift.changes)}",
            hint="run `smolbuild lock --update` and commit the lock, or build what is locked with "
            'on_base_drift = "warn"',
            code="base-drift",
        )
    if policy == "rebuild" and not locked:
        # An image on this host is not in what was found: the lock's own entry stays.
        lock = replace(
            found.lock,
            image=found.lock.image or state.lock.image,
            dockerfile=state.lock.dockerfile,
        )
        return renew_lock(context, smolfile, lock, drift.changes), drift
    followed = " (--locked: the lock is followed)" if policy == "rebuild" else ""
    text = f"the base drifted{followed}: {'; '.join(drift.changes)}"
    context.emit(Message(level="warning", text=text))
    return state, drift


def _look(
    context: BuildContext, smolfile: Smolfile, path: Path, *, patient: bool, force: bool
) -> _Found:
    remembered = None if force else _recall(path)
    if remembered is not None:
        age = context.now() - remembered.checked
        if remembered.lock is not None and 0 <= age < _REMEMBERED:
            return remembered
        if remembered.lock is None and not patient and 0 <= age < _FAILURE_REMEMBERED:
            return remembered
    try:
        found = _Found(checked=context.now(), lock=resolve_lock(context, smolfile, local=False))
    except UsageError:
        raise
    except SmolbuildError as error:
        found = _Found(checked=context.now(), lock=None, problem=error.message)
    _remember(path, found)
    return found


def _memory(context: BuildContext, smolfile: Smolfile) -> Path:
    """Return where the answer for this base and kernel is remembered."""
    question = {
        "image": smolfile.image,
        "base": None if smolfile.base is None else encode(smolfile.base),
        "kernel": smolfile.kernel is None,
    }
    directory = private_directory(context.home.cache / "drift")
    return directory / f"{hex_of(digest_value('smolbuild.drift.v1', question))}.json"


def _remember(path: Path, found: _Found) -> None:
    lock = None if found.lock is None else encode_lock(found.lock).decode()
    value = {"checked": found.checked, "lock": lock, "problem": found.problem}
    write_atomic(path, json.dumps(value).encode())


def _recall(path: Path) -> _Found | None:
    try:
        value = json.loads(path.read_bytes())
        text = value["lock"]
        return _Found(
            checked=float(value["checked"]),
            lock=None if text is None else parse_lock(text.encode(), file=path.name),
            problem=str(value["problem"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError):
        return None  # damaged, or of another version: asked anew
