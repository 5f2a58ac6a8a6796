"""The step cache: each step's disk delta, under the chain key of everything up to the step."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.core.files import fsync_directory, private_directory, write_atomic
from smolbuild.core.values import dataclass
from smolbuild.model.egress import EgressRecord

__all__ = ["CachedDelta", "StepCache", "lineage_of"]

_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDelta:
    """A delta in the cache, and the token by which the delta above it names this very one."""

    path: Path
    token: str
    egress: tuple[EgressRecord, ...] = ()
    """What the step asked of the network when it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What is kept beside a delta: what nobody can see again without running the step."""

    egress: tuple[EgressRecord, ...]


def lineage_of(base: Digest) -> str:
    """Return the token of the base disk with this digest, over which first deltas lie."""
    return hex_of(base)[:_TOKEN]


class StepCache:
    """Disk deltas (qcow2, 64 KiB clusters) by chain key, in ``Home.cache/steps``.

    A delta fits only over the very disk that it was made on: the same step run twice leaves two
    disks that differ in times and block numbers, although their chain key is the same. So each
    entry, ``<chain key>.<token below>.<own token>.<bytes>.qcow2``, names what it lies on, and only
    entries that lie on each other are ever used together. Beside it lies what was seen while the
    step ran (``….json``). Entries appear whole or not at all, and one that was cut short afterwards
    is none; safe for many processes.
    """

    def __init__(self, cache: Path) -> None:
        self._root = private_directory(cache / "steps")

    def prefix(
        self, chain: tuple[Digest, ...], base: Digest | None = None, *, since: float = 0.0
    ) -> tuple[CachedDelta, ...]:
        """Return the most deltas for the first entries of ``chain`` that lie on each other.

        Args:
            chain: keys of the disk, lowest first.
            base: digest of the base disk; without it the lowest delta may lie on any.
            since: seconds since 1970; what was made before is not used.

        """
        return self._stack(chain, None if base is None else lineage_of(base), since)

    def keep(
        self,
        chain_key: Digest,
        below: str,
        overlay: Path,
        *,
        egress: tuple[EgressRecord, ...] = (),
    ) -> str:
        """Keep a finished overlay, which must not change any more, and return its token.

        The file is shared by hard link, so that a machine that still has it open goes on
        undisturbed. Each call makes an entry of its own.

        Args:
            chain_key: of everything up to and with the step.
            below: the token of the disk that the overlay lies on.
            overlay: a qcow2 file on the same file system.
            egress: what the step asked of the network.

        Raises:
            OSError: the disk is full, for example.

        """
        token = os.urandom(_TOKEN // 2).hex()
        with overlay.open("rb") as stream:
            os.fsync(stream.fileno())
            size = os.fstat(stream.fileno()).st_size
        target = self._root / f"{hex_of(chain_key)}.{below}.{token}.{size}.qcow2"
        seen = json.dumps(encode(_Seen(egress=egress))).encode()
        write_atomic(target.with_suffix(".json"), seen, mode=0o600)
        os.link(overlay, target)
        fsync_directory(self._root)
        return token

    def forget(self, chain: tuple[Digest, ...]) -> None:
        """Drop the entries of ``chain``, and what lies on them. Idempotent."""
        doomed = {hex_of(key) for key in chain}
        entries = list(self._entries())
        gone = {token for key, _, token, _ in entries if key in doomed}
        while True:
            more = {token for _, below, token, _ in entries if below in gone} - gone
            if not more:
                break
            gone |= more
        for _, _, token, path in entries:
            if token in gone:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    path.with_suffix(".json").unlink(missing_ok=True)

    def _stack(
        self, chain: tuple[Digest, ...], below: str | None, since: float
    ) -> tuple[CachedDelta, ...]:
        best: tuple[CachedDelta, ...] = ()
        if not chain:
            return best
        for path in sorted(self._root.glob(f"{hex_of(chain[0])}.{below or '*'}.*.*.qcow2")):
            token, size = path.name.split(".")[2:4]
            seen = _seen(path.with_suffix(".json"), since)
            if seen is None or not _has_size(path, size):
                continue
            delta = CachedDelta(path=path, token=token, egress=seen.egress)
            found = (delta, *self._stack(chain[1:], token, since))
            if len(found) > len(best):
                best = found
            if len(best) == len(chain):
                break
        return best

    def _entries(self) -> Iterator[tuple[str, str, str, Path]]:
        for path in self._root.glob("*.qcow2"):
            parts = path.name.split(".")
            if len(parts) == 5:
                yield parts[0], parts[1], parts[2], path


def _has_size(path: Path, size: str) -> bool:
    try:
        return size.isdecimal() and path.stat().st_size >= int(size)
    except FileNotFoundError:
        return False


def _seen(path: Path, since: float) -> _Seen | None:
    """Return what was seen, None when it is missing, damaged or older: the step must run again."""
    try:
        if path.stat().st_mtime < since:  # written with the delta, and never again
            return None
        return decode(_Seen, json.loads(path.read_bytes()), "step cache")
    except (OSError, ValueError, VerificationError):
        return None
