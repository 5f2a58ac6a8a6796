"""Keep the step cache within its size: what was used longest ago goes first, what is used stays."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smolbuild.build.cache import steps_root
from smolbuild.build.cache_entry import Entry, entries_in, hold
from smolbuild.core.files import remove_tree

__all__ = ["CachedItem", "Evicted", "evict", "list_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedItem:
    """A step in the cache, for people. Sizes are bytes on the disk."""

    key: str
    """Hex digits of the chain key."""
    token: str
    artifact: str
    step: str
    disk_bytes: int
    memory_bytes: int
    used_at: float
    """Seconds since 1970."""
    in_use: bool
    """Whether a running build needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """What left the cache, or would."""

    steps: int
    """Steps of which nothing is left."""
    memories: int
    """Further steps whose machine was let go, and whose disk stays."""
    freed: int
    """Bytes."""
    left: int
    """Bytes that the cache holds afterwards."""
    in_use: int
    """Bytes of ``left`` that running builds need."""


@dataclass(slots=True, kw_only=True)
class _State:
    """An entry while it is decided what goes."""

    entry: Entry
    disk: int
    memory: int
    used: float
    resumed: float
    children: int
    held: bool


def list_cache(cache: Path) -> tuple[CachedItem, ...]:
    """Return every step in the cache, the one used last first; damaged ones have no names."""
    items = []
    for state in _states(cache):
        kept = state.entry.read()
        items.append(
            CachedItem(
                key=state.entry.key,
                token=state.entry.token,
                artifact="" if kept is None else kept.artifact,
                step="" if kept is None else kept.step,
                disk_bytes=state.disk,
                memory_bytes=state.memory,
                used_at=max(state.used, state.resumed),
                in_use=state.held,
            )
        )
    return tuple(sorted(items, key=lambda item: item.used_at, reverse=True))


def evict(
    cache: Path, *, max_bytes: int, older_than: float | None = None, dry_run: bool = False
) -> Evicted:
    """Remove steps until the cache holds at most ``max_bytes``, and those not used lately.

    The saved machine of a step goes apart from its disk: whichever was used longer ago goes first.
    A disk goes only after everything that lies on it, and nothing that a running build of any
    process uses or has just made goes at all. Safe beside builds and other evictions; idempotent.

    Args:
        cache: ``Home.cache``.
        max_bytes: the most that may stay.
        older_than: seconds since 1970: what was used last before goes, whatever the size.
        dry_run: only say what would go.

    """
    if not dry_run:
        _sweep(cache)
    states = {state.entry.token: state for state in _states(cache)}
    total = sum(state.disk + state.memory for state in states.values())
    steps = memories = freed = 0
    oldest = 0.0 if older_than is None else older_than
    while True:
        found = min(_candidates(states), default=None)
        if found is None or (total - freed <= max_bytes and found[0] >= oldest):
            break
        _, what, token = found
        state = states[token]
        gone = state.memory if what == "memory" else state.disk + state.memory
        if not dry_run and not _remove(state.entry, what):
            state.held = True  # somebody has just begun to use it
            continue
        freed += gone
        if what == "memory":
            memories += 1
            state.memory, state.resumed = 0, 0.0
            continue
        steps += 1
        del states[token]
        if state.entry.below in states:
            states[state.entry.below].children -= 1
    held = sum(state.disk + state.memory for state in states.values() if state.held)
    return Evicted(steps=steps, memories=memories, freed=freed, left=total - freed, in_use=held)


def _sweep(cache: Path) -> None:
    """Remove what killed builds were writing."""
    for path in steps_root(cache).glob(".tmp-*"):
        held = hold(path, exclusive=True)
        if held is not None:
            remove_tree(path)
            os.close(held)


def _candidates(
    states: dict[str, _State],
) -> Iterator[tuple[float, Literal["memory", "step"], str]]:
    """Yield what may go next, with when it was used last."""
    for token, state in states.items():
        if state.held:
            continue
        if state.memory:
            yield state.resumed, "memory", token
        if not state.children:
            # Its machine is of no use without its disk, so both are as young as the younger one.
            yield max(state.used, state.resumed), "step", token


def _states(cache: Path) -> list[_State]:
    entries = list(entries_in(steps_root(cache)))
    children: dict[str, int] = {}
    for entry in entries:
        children[entry.below] = children.get(entry.below, 0) + 1
    states = []
    for entry in entries:
        disk, memory = entry.sizes()
        states.append(
            _State(
                entry=entry,
                disk=disk,
                memory=memory,
                used=entry.used_at(),
                resumed=entry.resumed_at(),
                children=children.get(entry.token, 0),
                held=not _is_free(entry.path),
            )
        )
    return states


def _is_free(path: Path) -> bool:
    held = hold(path, exclusive=True)
    if held is None:
        return False
    os.close(held)
    return True


def _remove(entry: Entry, what: Literal["memory", "step"]) -> bool:
    held = hold(entry.path, exclusive=True)
    if held is None:
        return not entry.path.exists()
    try:
        if what == "memory":
            entry.drop_memory()
        else:
            entry.remove()
    finally:
        os.close(held)
    return True
