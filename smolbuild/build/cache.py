"""The step cache: each step's disk delta, and the machine as it stood after the step."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from smolbuild.build.cache_entry import (
    Entry,
    SavedMemory,
    entries_in,
    hold,
    new_token,
    write_record,
)
from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.files import fsync_directory, private_directory, remove_tree
from smolbuild.core.values import dataclass
from smolbuild.model.egress import EgressRecord

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["CachedStep", "StepCache", "lineage_of", "steps_root"]

_LINEAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """A step in the cache, and the token by which the delta above it names this very one."""

    path: Path
    """The delta; linked elsewhere once it is borrowed."""
    token: str
    egress: tuple[EgressRecord, ...] = ()
    """What the step asked of the network when it ran."""
    memory: SavedMemory | None = None
    """The machine as it stood after the step, if it was kept."""
    entry: Entry


def lineage_of(base: Digest) -> str:
    """Return the token of the base disk with this digest, over which first deltas lie."""
    return hex_of(base)[:_LINEAGE]


def steps_root(cache: Path) -> Path:
    """Return where steps are kept in ``Home.cache``."""
    return private_directory(cache / "steps")


class StepCache:
    """Steps by chain key, in ``Home.cache/steps``. A build uses it as a context manager.

    A delta fits only over the very disk that it was made on: the same step run twice leaves two
    disks that differ in times and block numbers, although their chain key is the same. So each
    entry names what it lies on, and only entries that lie on each other are ever used together.
    Entries appear whole or not at all, and one that was cut short afterwards is none; what a living
    build uses or made is locked against eviction. Safe for many processes.
    """

    def __init__(self, cache: Path) -> None:
        self._root = steps_root(cache)
        self._held: list[int] = []
        self._staged: set[Path] = set()
        self._writer: ThreadPoolExecutor | None = None
        self._writing: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # whoever wants to know has settled before
            self.settle()
        for directory in self._staged:
            with contextlib.suppress(OSError):
                remove_tree(directory)
        while self._held:
            os.close(self._held.pop())

    def prefix(
        self, chain: tuple[Digest, ...], base: Digest | None = None, *, since: float = 0.0
    ) -> tuple[CachedStep, ...]:
        """Return the most entries for the first keys of ``chain`` that lie on each other.

        Of several as long, one whose last machine was saved comes first, then the one used last.

        Args:
            chain: keys of the disk, lowest first.
            base: digest of the base disk; without it the lowest delta may lie on any.
            since: seconds since 1970; what was made before is not used.

        """
        wanted = {hex_of(key) for key in chain}
        found: dict[str, list[Entry]] = {}
        for entry in entries_in(self._root):
            if entry.key in wanted:
                found.setdefault(entry.key, []).append(entry)
        for same in found.values():
            same.sort(key=Entry.used_at, reverse=True)
        return _stack(found, chain, None if base is None else lineage_of(base), since)

    def borrow(self, steps: tuple[CachedStep, ...], directory: Path) -> tuple[CachedStep, ...]:
        """Lock ``steps`` until the end of the build and link their deltas into ``directory``.

        Returns those that are still there: from the first missing one on, the steps must run.
        """
        borrowed: list[CachedStep] = []
        for number, step in enumerate(steps):
            path = directory / f"cached-{number}.qcow2"
            held = hold(step.entry.path)
            if held is None:
                break
            self._held.append(held)
            try:
                # A link of our own: a build without cache removes entries, whoever uses them.
                os.link(step.path, path)
            except FileNotFoundError:
                break
            step.entry.touch()
            borrowed.append(dataclasses.replace(step, path=path))
        return tuple(borrowed)

    def stage(self) -> Path:
        """Return an empty directory for ``keep``, on the file system of the machines' own files."""
        while True:
            directory = self._root / f".tmp-{new_token()}"
            directory.mkdir(mode=0o700)
            held = hold(directory)
            if held is not None:  # else it was taken for what a killed build left
                self._held.append(held)
                self._staged.add(directory)
                return directory

    def keep(
        self,
        directory: Path,
        chain_key: Digest,
        below: str,
        *,
        step: str,
        artifact: str,
        memory: SavedMemory | None = None,
        egress: tuple[EgressRecord, ...] = (),
    ) -> Entry:
        """Keep what was put into a staged ``directory`` and return the entry that it becomes.

        It appears once it is on the disk, at the latest when ``settle`` returns. Each call makes an
        entry of its own.

        Args:
            directory: from ``stage``; holds ``disk.qcow2``, a finished delta, and the files
                ``memory`` and ``state`` of a saved machine.
            chain_key: of everything up to and with the step.
            below: the token of the disk that the delta lies on.
            step: its name, for people.
            artifact: what is being built, for people.
            memory: the machine as it stood after the step; None: only its disk is kept.
            egress: what the step asked of the network.

        Raises:
            OSError: the disk is full, for example.

        """
        entry = Entry.of(self._root, chain_key, below, new_token())
        write_record(
            directory,
            step=step,
            artifact=artifact,
            egress=egress,
            saved=memory,
        )
        if self._writer is None:
            from concurrent.futures import ThreadPoolExecutor

            # One thread: an entry is on the disk before what lies on it.
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="step-cache")
        self._writing.append(self._writer.submit(self._publish, directory, entry.path))
        return entry

    def settle(self) -> None:
        """Wait until everything kept is on the disk.

        Raises:
            OSError: something could not be written; it is no entry then.

        """
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        done, self._writing = self._writing, []
        for future in done:
            future.result()

    def forget(self, chain: tuple[Digest, ...]) -> None:
        """Drop the entries of ``chain``, and what lies on them. Idempotent."""
        doomed = {hex_of(key) for key in chain}
        entries = list(entries_in(self._root))
        gone = {entry.token for entry in entries if entry.key in doomed}
        while True:
            more = {entry.token for entry in entries if entry.below in gone} - gone
            if not more:
                break
            gone |= more
        for entry in entries:
            if entry.token in gone:
                entry.remove()

    def _publish(self, directory: Path, target: Path) -> None:
        with os.scandir(directory) as listing:
            for found in listing:
                descriptor = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        fsync_directory(directory)
        directory.rename(target)
        self._staged.discard(directory)
        fsync_directory(self._root)


def _stack(
    found: Mapping[str, list[Entry]], chain: tuple[Digest, ...], below: str | None, since: float
) -> tuple[CachedStep, ...]:
    best: tuple[CachedStep, ...] = ()
    if not chain:
        return best
    for entry in found.get(hex_of(chain[0]), ()):
        if below not in (None, entry.below) or (kept := entry.read(since)) is None:
            continue
        step = CachedStep(
            path=entry.disk,
            token=entry.token,
            egress=kept.egress,
            memory=entry.memory_of(kept),
            entry=entry,
        )
        stack = (step, *_stack(found, chain[1:], entry.token, since))
        if _rank(stack) > _rank(best):
            best = stack
        if len(best) == len(chain) and best[-1].memory is not None:
            break
    return best


def _rank(stack: tuple[CachedStep, ...]) -> tuple[int, bool]:
    return len(stack), bool(stack) and stack[-1].memory is not None
