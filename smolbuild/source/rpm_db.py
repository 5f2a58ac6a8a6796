"""Names and versions in an rpm database: SQLite (Fedora, RHEL 9) and NDB (SUSE).

A header blob is two big-endian counts, 16 bytes for each entry (tag, type, offset, count) and the
data they point into; see rpm's ``lib/header.c`` and, for NDB, ``lib/backend/ndb/rpmpkg.c``.
"""

import contextlib
import sqlite3
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["read_rpm_ndb", "read_rpm_sqlite"]

_NAME, _VERSION, _RELEASE, _EPOCH = 1000, 1001, 1002, 1003
_STRING, _INT32 = 6, 4
_MAX_ENTRIES = 65536
_SECONDS = 20.0
_STEPS = 20_000
_NDB_PAGE, _NDB_SLOT, _NDB_BLOCK = 4096, 16, 16


def read_rpm_sqlite(database: bytes, log: bytes | None = None) -> list[tuple[str, str]]:
    """Return ``(name, epoch:version-release)`` of each package in ``rpmdb.sqlite``.

    The file is foreign: what is no database, or takes too long to read, gives what was read.

    Args:
        database: the file's bytes.
        log: those of its write-ahead log.

    """
    found: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="smolbuild-rpm-") as directory:
        path = Path(directory) / "rpmdb.sqlite"
        path.write_bytes(database)
        if log:
            path.with_name("rpmdb.sqlite-wal").write_bytes(log)
        until = time.monotonic() + _SECONDS
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(path)) as connection,
        ):
            connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
            connection.execute("PRAGMA trusted_schema = OFF")
            for (blob,) in connection.execute("SELECT blob FROM Packages"):
                package = _package(blob) if isinstance(blob, bytes) else None
                if package is not None:
                    found.append(package)
    return found


def read_rpm_ndb(database: bytes) -> list[tuple[str, str]]:
    """Return the same of ``Packages.db``; damaged parts are left out."""
    found: list[tuple[str, str]] = []
    if len(database) < 32 or database[:4] != b"RpmP":
        return found
    pages = struct.unpack_from("<I", database, 12)[0]
    end = min(pages * _NDB_PAGE, len(database))
    for place in range(2 * _NDB_SLOT, end - _NDB_SLOT + 1, _NDB_SLOT):
        magic, number, first, count = struct.unpack_from("<4sIII", database, place)
        start = first * _NDB_BLOCK
        if magic != b"Slot" or not number or start + 16 > len(database):
            continue
        head, owner, _, length = struct.unpack_from("<4sIII", database, start)
        if head == b"BlbS" and owner == number and length <= count * _NDB_BLOCK:
            package = _package(database[start + 16 : start + 16 + length])
            if package is not None:
                found.append(package)
    return found


def _package(header: bytes) -> tuple[str, str] | None:
    try:
        tags = dict(_tags(header))
    except struct.error:
        return None
    name, version = tags.get(_NAME), tags.get(_VERSION)
    if not name or not version:
        return None
    epoch, release = tags.get(_EPOCH, ""), tags.get(_RELEASE, "")
    return name, (f"{epoch}:" if epoch else "") + version + (f"-{release}" if release else "")


def _tags(header: bytes) -> Iterator[tuple[int, str]]:
    entries, length = struct.unpack_from(">II", header)
    data = 8 + entries * 16
    if entries > _MAX_ENTRIES or data + length > len(header):
        return
    for number in range(entries):
        tag, kind, offset, _ = struct.unpack_from(">iiiI", header, 8 + number * 16)
        if tag not in {_NAME, _VERSION, _RELEASE, _EPOCH} or not 0 <= offset < length:
            continue
        if kind == _STRING:
            end = header.find(b"\0", data + offset, data + length)
            yield tag, header[data + offset : end].decode("utf-8", "replace") if end >= 0 else ""
        elif kind == _INT32:
            yield tag, str(struct.unpack_from(">I", header, data + offset)[0])
