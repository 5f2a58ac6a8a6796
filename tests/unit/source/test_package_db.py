"""Packages from the databases that a disk holds."""

import sqlite3
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.source.package_db import read_packages
from smolbuild.source.rpm_db import read_rpm_ndb, read_rpm_sqlite

DPKG = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u7
Description: GNU C Library
 Version: this line goes on

Package: gone
Status: deinstall ok config-files
Version: 1

Package: held
Status: hold ok installed
Version: 3
"""
APK = "C:Q1\nP:musl\nV:1.2.4-r2\nF:lib\nR:ld.so\n\nP:busybox\nV:1.36.1-r5\n\n"


def packages(files: Mapping[str, str | bytes]) -> dict[str, dict[str, str]]:
    contents = {
        path.encode(): data if isinstance(data, bytes) else data.encode()
        for path, data in files.items()
    }
    found = read_packages(contents, lambda path, limit: contents[path][: limit + 1])
    return {manager: dict(names) for manager, names in found.items()}


def header(name: str, version: str, release: str, epoch: int | None = None) -> bytes:
    """Return an rpm header blob."""
    texts = [(1000, name), (1001, version), (1002, release)]
    data, entries = b"", b""
    for tag, text in texts:
        entries += struct.pack(">iiiI", tag, 6, len(data), 1)
        data += text.encode() + b"\0"
    if epoch is not None:
        data = data.ljust(-(-len(data) // 4) * 4, b"\0")
        entries += struct.pack(">iiiI", 1003, 4, len(data), 1)
        data += struct.pack(">I", epoch)
    return struct.pack(">II", len(entries) // 16, len(data)) + entries + data


HEADERS = [header("bash", "5.2", "1.fc40"), header("shadow", "4.15", "2", epoch=2), b"junk"]
NAMES = [("bash", "5.2-1.fc40"), ("shadow", "2:4.15-2")]


def rpm_sqlite(directory: Path, *, journal: str = "delete") -> tuple[bytes, bytes | None]:
    path = directory / "rpmdb.sqlite"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute("CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, blob BLOB NOT NULL)")
    connection.executemany("INSERT INTO Packages (blob) VALUES (?)", [(h,) for h in HEADERS])
    connection.commit()
    log = path.with_name("rpmdb.sqlite-wal")
    found = path.read_bytes(), log.read_bytes() if log.exists() else None
    connection.close()
    return found


def rpm_ndb() -> bytes:
    blobs, slots, at = b"", b"", 4096 // 16
    for number, content in enumerate(HEADERS[:2], start=1):
        blob = struct.pack("<4sIII", b"BlbS", number, 1, len(content)) + content
        blob = blob.ljust(-(-(len(blob) + 12) // 16) * 16, b"\0")
        slots += struct.pack("<4sIII", b"Slot", number, at, len(blob) // 16)
        at += len(blob) // 16
        blobs += blob
    head = struct.pack("<4sIIIIIII", b"RpmP", 0, 1, 1, 3, 0, 0, 0)
    return (head + slots).ljust(4096, b"\0") + blobs


def test_dpkg_counts_what_is_installed() -> None:
    assert packages({"/var/lib/dpkg/status": DPKG}) == {
        "dpkg": {"held": "3", "libc6": "2.36-9+deb12u7"}
    }


def test_dpkg_of_an_image_without_a_package_manager() -> None:
    files = {
        "/var/lib/dpkg/status.d/base-files": "Package: base-files\nVersion: 12.4\n",
        "/var/lib/dpkg/status.d/base-files.md5sums": "Package: no\nVersion: 1\n",
    }
    assert packages(files) == {"dpkg": {"base-files": "12.4"}}


def test_a_name_that_is_installed_twice_has_both_versions() -> None:
    twice = "Package: a\nVersion: 2\n\nPackage: a\nVersion: 1\n\nPackage: a\nVersion: 1\n"
    assert packages({"/var/lib/dpkg/status": twice}) == {"dpkg": {"a": "1, 2"}}


def test_apk() -> None:
    expected = {"apk": {"busybox": "1.36.1-r5", "musl": "1.2.4-r2"}}
    assert packages({"/lib/apk/db/installed": APK}) == expected
    assert packages({"/usr/lib/apk/db/installed": APK}) == expected


@pytest.mark.parametrize("directory", ["/var/lib/rpm", "/usr/lib/sysimage/rpm"])
def test_rpm_in_sqlite(tmp_path: Path, directory: str) -> None:
    data, _ = rpm_sqlite(tmp_path)
    assert packages({f"{directory}/rpmdb.sqlite": data}) == {"rpm": dict(NAMES)}


def test_what_stands_only_in_the_log_of_an_rpm_database_counts(tmp_path: Path) -> None:
    data, log = rpm_sqlite(tmp_path, journal="wal")
    assert log
    assert read_rpm_sqlite(data) == []
    assert read_rpm_sqlite(data, log) == NAMES


def test_rpm_in_ndb() -> None:
    assert packages({"/usr/lib/sysimage/rpm/Packages.db": rpm_ndb()}) == {"rpm": dict(NAMES)}


def test_a_hostile_rpm_database_ends(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("smolbuild.source.rpm_db._SECONDS", 0.2)
    path = tmp_path / "db"
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE VIEW Packages AS WITH RECURSIVE n(blob) AS (SELECT 1 UNION ALL SELECT blob FROM n)"
        " SELECT blob FROM n"
    )
    connection.commit()
    connection.close()
    assert read_rpm_sqlite(path.read_bytes()) == []


def test_python_and_node_modules() -> None:
    site = "/usr/lib/python3/dist-packages"
    files = {
        f"{site}/Flask_Login-0.6.dist-info/METADATA": "Name: Flask_Login\nVersion: 0.6\n\nName: x",
        f"{site}/old.egg-info/PKG-INFO": "Metadata-Version: 1\nName: old\nVersion: 1\n",
        f"{site}/single.egg-info": "Name: single\nVersion: 2\n",
        "/usr/lib/node_modules/npm/package.json": '{"name": "npm", "version": "10.1"}',
        "/usr/lib/node_modules/@scope/tool/package.json": '{"version": "1.0"}',
        "/usr/lib/node_modules/npm/node_modules/inner/package.json": '{"version": "9"}',
        "/usr/lib/node_modules/broken/package.json": "{",
        "/srv/app/node_modules/local/package.json": '{"version": "1"}',
    }
    assert packages(files) == {
        "pip": {"flask-login": "0.6", "old": "1", "single": "2"},
        "npm": {"@scope/tool": "1.0", "npm": "10.1"},
    }


def test_no_database_is_no_packages() -> None:
    assert packages({"/etc/passwd": "root"}) == {}


PATHS = [
    "/var/lib/dpkg/status",
    "/lib/apk/db/installed",
    "/var/lib/rpm/rpmdb.sqlite",
    "/var/lib/rpm/Packages.db",
    "/x/a.dist-info/METADATA",
    "/usr/lib/node_modules/a/package.json",
]
damaged = st.sampled_from([rpm_ndb(), DPKG.encode(), APK.encode(), *HEADERS])


@given(st.sampled_from(PATHS), st.binary(max_size=60), damaged, st.integers(0, 4200))
def test_whatever_a_disk_holds_is_read_or_left_out(
    path: str, junk: bytes, whole: bytes, place: int
) -> None:
    data = whole[:place] + junk + whole[place + len(junk) :]
    for content in (junk, data):
        for versions in packages({path: content}).values():
            assert all(name and version for name, version in versions.items())


@given(st.binary(max_size=80), st.integers(0, 4200))
def test_a_damaged_ndb_is_no_error(junk: bytes, place: int) -> None:
    whole = rpm_ndb()
    assert len(read_rpm_ndb(whole[:place] + junk + whole[place + len(junk) :])) <= 2
