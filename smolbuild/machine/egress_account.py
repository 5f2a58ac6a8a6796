"""The account of one machine's requests: bounded, whatever a guest does, and read once."""

import dataclasses
import threading
from typing import Any

from smolbuild.model.egress import EgressRecord

__all__ = ["Account"]

_LIMITS: tuple[tuple[int, dict[str, Any]], ...] = (
    (10_000, {}),
    (20_000, {"url": ""}),
    (20_001, {"host": "*", "port": 0, "url": "", "status": 0}),
)
"""How many records of requests that were carried there are, and again of those that were denied,
until what follows is told apart less."""


class Account:
    """Requests since the last ``take``, alike ones as one record. Safe from any thread.

    Beyond 10,000 different ones URLs are not told apart, beyond 20,000 hosts are not either: so a
    guest that makes up names can neither fill this host's memory nor push a record out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[bool, dict[EgressRecord, EgressRecord]] = {False: {}, True: {}}
        self._open: dict[int, EgressRecord] = {}
        self._number = 0

    def begin(self, record: EgressRecord) -> int:
        """Note a request that is not answered yet; return its number for ``end``."""
        with self._lock:
            self._number += 1
            self._open[self._number] = record
            return self._number

    def end(self, number: int, record: EgressRecord) -> None:
        """Replace what ``begin`` noted; nothing if it was taken in between."""
        with self._lock:
            if self._open.pop(number, None) is not None:
                self._add(record)

    def add(self, record: EgressRecord) -> None:
        """Note a request that is over."""
        with self._lock:
            self._add(record)

    def take(self) -> tuple[EgressRecord, ...]:
        """Return what was noted since the last call, in the order of first requests, once."""
        with self._lock:
            for record in self._open.values():
                self._add(record)
            taken = tuple(r for kind in self._ended.values() for r in kind.values())
            self._open.clear()
            self._ended = {False: {}, True: {}}
            return taken

    def _add(self, record: EgressRecord) -> None:
        kept = self._ended[record.denied]
        alike = dataclasses.replace(record, sent=0, received=0, requests=1)
        for limit, coarser in _LIMITS:
            key = dataclasses.replace(alike, **coarser)
            if key in kept or len(kept) < limit:
                break
        same = kept.get(key)
        kept[key] = dataclasses.replace(
            key,
            sent=record.sent + (same.sent if same else 0),
            received=record.received + (same.received if same else 0),
            requests=record.requests + (same.requests if same else 0),
        )
