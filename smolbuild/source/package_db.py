"""Which packages a disk holds, read from its own databases without running anything in it.

Formats: dpkg's ``status`` (deb-control(5)), apk's ``installed``, rpm's SQLite and NDB databases,
``METADATA`` of Python distributions (PEP 566) and ``package.json`` of globally installed modules.
The disk is not trusted: what is malformed or too large is left out.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from smolbuild.source.rpm_db import read_rpm_ndb, read_rpm_sqlite

__all__ = ["Packages", "ReadFile", "read_packages"]

ReadFile = Callable[[bytes, int], bytes | None]
"""Gives the content of the regular file with this path, None when it is larger than the limit or
there is none."""

Packages = Mapping[str, Mapping[str, str]]
"""Versions by package name, by the program that manages them: ``dpkg``, ``apk``, ``rpm``, ``pip``,
``npm``."""

_LARGE = 256 << 20
_SMALL = 1 << 20
_HEAD = 64 << 10
_DPKG = b"/var/lib/dpkg/status"
_DPKG_PARTS = b"/var/lib/dpkg/status.d/"
_APK = (b"/lib/apk/db/installed", b"/usr/lib/apk/db/installed")
_RPM = (b"/var/lib/rpm/", b"/usr/lib/sysimage/rpm/")
_PIP = re.compile(rb"\.(?:dist-info/METADATA|egg-info/PKG-INFO|egg-info)\Z")
_NPM = re.compile(rb"/lib/node_modules/((?:@[^/]+/)?[^/@.][^/]*)/package\.json\Z")


def read_packages(paths: Iterable[bytes], read: ReadFile) -> Packages:
    """Return the packages of a disk that has files at ``paths``; managers without any left out."""
    known = set(paths)
    found = {
        "dpkg": _merged(_dpkg(known, read)),
        "apk": _merged(_apk(known, read)),
        "rpm": _merged(_rpm(known, read)),
        "pip": _merged(_pip(known, read)),
        "npm": _merged(_npm(known, read)),
    }
    return {manager: packages for manager, packages in found.items() if packages}


def _merged(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return versions by name; of a name that is there twice, all of them."""
    versions: dict[str, set[str]] = {}
    for name, version in pairs:
        if name and version:
            versions.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions[name])) for name in sorted(versions)}


def _dpkg(known: set[bytes], read: ReadFile) -> Iterator[tuple[str, str]]:
    parts = sorted(p for p in known if p.startswith(_DPKG_PARTS) and not p.endswith(b".md5sums"))
    for path in (_DPKG, *parts):
        data = read(path, _LARGE) if path in known else None
        for fields in _stanzas(data or b""):
            status = fields.get("Status", "install ok installed")
            if status.endswith(" installed"):
                yield fields.get("Package", ""), fields.get("Version", "")


def _stanzas(data: bytes) -> Iterator[dict[str, str]]:
    for stanza in data.decode("utf-8", "replace").split("\n\n"):
        fields = {}
        for line in stanza.splitlines():
            name, colon, value = line.partition(":")
            if colon and not line[:1].isspace():
                fields[name] = value.strip()
        yield fields


def _apk(known: set[bytes], read: ReadFile) -> Iterator[tuple[str, str]]:
    for path in _APK:
        data = read(path, _LARGE) if path in known else None
        for stanza in (data or b"").decode("utf-8", "replace").split("\n\n"):
            fields = dict(line.partition(":")[::2] for line in reversed(stanza.splitlines()))
            yield fields.get("P", ""), fields.get("V", "")


def _rpm(known: set[bytes], read: ReadFile) -> Iterator[tuple[str, str]]:
    for directory in _RPM:
        database, log = directory + b"rpmdb.sqlite", directory + b"rpmdb.sqlite-wal"
        data = read(database, _LARGE) if database in known else None
        if data:
            yield from read_rpm_sqlite(data, read(log, _LARGE) if log in known else None)
        ndb = directory + b"Packages.db"
        data = read(ndb, _LARGE) if ndb in known else None
        if data:
            yield from read_rpm_ndb(data)


def _pip(known: set[bytes], read: ReadFile) -> Iterator[tuple[str, str]]:
    for path in sorted(path for path in known if _PIP.search(path)):
        head = (read(path, _SMALL) or b"")[:_HEAD].decode("utf-8", "replace")
        fields = next(_stanzas(head.partition("\n\n")[0].encode()))
        yield fields.get("Name", "").lower().replace("_", "-"), fields.get("Version", "")


def _npm(known: set[bytes], read: ReadFile) -> Iterator[tuple[str, str]]:
    for path in sorted(known):
        match = _NPM.search(path)
        if match is None:
            continue
        try:
            value = json.loads(read(path, _SMALL) or b"")
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("version"), str):
            yield match[1].decode("utf-8", "replace"), value["version"]
