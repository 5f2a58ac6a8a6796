"""One entry of the step cache: a directory with a step's disk delta and what lies beside it.

``<chain key>.<token below>.<own token>/`` holds ``disk.qcow2``, ``entry.json`` and, unless it was
let go, the machine as it stood after the step: ``memory`` (sparse) and ``state``. ``packed.json``
remembers the delta's chunks in the store. The modification times tell when each was made or last
used: ``entry.json`` made, ``disk.qcow2`` used, ``state`` resumed from.
"""

import base64
import binascii
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.core.files import remove_tree
from smolbuild.core.values import dataclass
from smolbuild.model.contract import Contract, Shape
from smolbuild.model.egress import EgressRecord

__all__ = [
    "DISK",
    "Entry",
    "Kept",
    "SavedMemory",
    "entries_in",
    "hold",
    "new_token",
    "write_record",
]

DISK = "disk.qcow2"
_RECORD = "entry.json"
_MEMORY = "memory"
_STATE = "state"
_PACKED = "packed.json"
_TOKEN = 16
_MIB = 1 << 20
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMemory:
    """What a machine is restored from, besides its disk."""

    memory: Path
    state: Path
    shape: Shape
    contract: Contract
    agent_cursor: bytes
    zero_freed: bool
    """Whether it was asked for a machine that leaves nothing of secrets in freed memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryRecord:
    state_bytes: int
    shape: Shape
    contract: Contract
    agent_cursor: str
    zero_freed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is written down of a step when it is kept."""

    step: str
    artifact: str
    """The artifact that was being built."""
    disk_bytes: int
    egress: tuple[EgressRecord, ...]
    memory: _MemoryRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where an entry lies, what disk it belongs to and which token is its own."""

    path: Path
    key: str
    """Hex digits of the chain key."""
    below: str
    token: str

    @classmethod
    def of(cls, root: Path, key: Digest, below: str, token: str) -> "Entry":
        """Return the entry that these would make."""
        path = root / f"{hex_of(key)}.{below}.{token}"
        return cls(path=path, key=hex_of(key), below=below, token=token)

    @property
    def disk(self) -> Path:
        """The delta."""
        return self.path / DISK

    @property
    def packed(self) -> Path:
        """What is remembered of the delta's chunks in the store."""
        return self.path / _PACKED

    def read(self, since: float = 0.0) -> Kept | None:
        """Return what was kept; None: damaged, cut short, or made before ``since``."""
        try:
            path = self.path / _RECORD
            if path.stat().st_mtime < since:  # written with the delta, and never again
                return None
            kept = decode(Kept, json.loads(path.read_bytes()), "step cache")
            whole = self.disk.stat().st_size >= kept.disk_bytes
        except (OSError, ValueError, VerificationError):
            return None
        return kept if whole else None

    def memory_of(self, kept: Kept) -> SavedMemory | None:
        """Return the saved machine, as far as lengths tell whether it is whole."""
        record = kept.memory
        if record is None:
            return None
        memory, state = self.path / _MEMORY, self.path / _STATE
        try:
            cursor = base64.b64decode(record.agent_cursor, validate=True)
            lengths = (memory.stat().st_size, state.stat().st_size)
        except (OSError, binascii.Error):
            return None
        if lengths != (record.shape.memory_mib * _MIB, record.state_bytes):
            return None
        return SavedMemory(
            memory=memory,
            state=state,
            shape=record.shape,
            contract=record.contract,
            agent_cursor=cursor,
            zero_freed=record.zero_freed,
        )

    def used_at(self) -> float:
        """Return when the delta was last used, in seconds since 1970; 0: it is not there."""
        return _mtime(self.disk)

    def resumed_at(self) -> float:
        """Return when the machine was last restored, or saved; 0: there is none."""
        return _mtime(self.path / _STATE)

    def sizes(self) -> tuple[int, int]:
        """Return the bytes that the disk delta and that the saved machine take on the disk."""
        memory = sum(_allocated(self.path / name) for name in (_MEMORY, _STATE))
        others = sum(_allocated(self.path / name) for name in (DISK, _RECORD, _PACKED))
        return others, memory

    def touch(self, *, resumed: bool = False) -> None:
        """Note that the delta, or the saved machine, is being used."""
        with contextlib.suppress(OSError):
            os.utime(self.path / (_STATE if resumed else DISK))

    def drop_memory(self) -> None:
        """Let the saved machine go and keep the delta. Idempotent."""
        for name in (_STATE, _MEMORY):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def remove(self) -> None:
        """Remove the entry: it is gone at once, its bytes shortly after. Idempotent."""
        doomed = self.path.with_name(f".tmp-gone-{self.token}")
        with contextlib.suppress(OSError):
            self.path.rename(doomed)
        with contextlib.suppress(OSError):
            remove_tree(doomed)


def new_token() -> str:
    """Return a token that no other disk has."""
    return os.urandom(_TOKEN // 2).hex()


def write_record(
    directory: Path,
    *,
    step: str,
    artifact: str,
    egress: tuple[EgressRecord, ...],
    saved: SavedMemory | None,
) -> None:
    """Write down what lies in ``directory``, without fsync."""
    memory = None
    if saved is not None:
        memory = _MemoryRecord(
            state_bytes=saved.state.stat().st_size,
            shape=saved.shape,
            contract=saved.contract,
            agent_cursor=base64.b64encode(saved.agent_cursor).decode(),
            zero_freed=saved.zero_freed,
        )
    kept = Kept(
        step=step,
        artifact=artifact,
        disk_bytes=(directory / DISK).stat().st_size,
        egress=egress,
        memory=memory,
    )
    (directory / _RECORD).write_text(json.dumps(encode(kept)), encoding="utf-8")


def entries_in(root: Path) -> Iterator[Entry]:
    """Yield every entry below ``root``, whether it is whole or not."""
    with os.scandir(root) as listing:
        for found in listing:
            parts = found.name.split(".")
            if len(parts) == 3 and parts[0]:
                key, below, token = parts
                yield Entry(path=Path(found.path), key=key, below=below, token=token)


def hold(path: Path, *, exclusive: bool = False) -> int | None:
    """Lock a directory against removal (or, exclusively, for it) and return the descriptor.

    The lock goes with the descriptor, also after kill -9, and stays with a directory that is
    renamed. None: it is gone, or somebody holds it; whoever only looks holds it for a moment, which
    a shared lock waits for.
    """
    until = time.monotonic() + (0.0 if exclusive else _LOOK_SECONDS)
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            # Somebody may have removed it between the two calls.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
        if time.monotonic() >= until:
            return None
        time.sleep(0.01)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
