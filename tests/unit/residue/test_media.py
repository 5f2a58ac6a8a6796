"""Disks of several deltas are read as the guest sees them, also where one delta borders another."""

import os
from pathlib import Path

import pytest

from smolbuild.residue.media import across_deltas, delta_medium, file_medium, layered_disk
from smolbuild.residue.scanner import Scanner
from smolbuild.residue.search import search
from smolbuild.store.qcow2 import CLUSTER, clusters, write_overlay

SECRET = b"correct-horse-battery-staple-7"
SIZE = 64 * CLUSTER


def overlay(path: Path, data: dict[int, bytes], zeros: tuple[int, ...] = ()) -> Path:
    with write_overlay(path, SIZE, data=tuple(data), zeros=zeros) as write:
        for number, content in data.items():
            write(number, memoryview(content.ljust(CLUSTER, b"\1")))
    return path


@pytest.fixture(scope="session")
def scanner(tmp_path_factory: pytest.TempPathFactory) -> Scanner:
    return Scanner(tmp_path_factory.mktemp("scanner"))


def test_a_secret_across_two_deltas_is_found_once(scanner: Scanner, tmp_path: Path) -> None:
    cut = 11
    one = overlay(tmp_path / "1", {3: SECRET[:cut].rjust(CLUSTER, b"\2"), 8: b"x"})
    two = overlay(tmp_path / "2", {4: SECRET[cut:]})
    deltas = [("one", one, list(clusters(one))), ("two", two, list(clusters(two)))]
    media = list(across_deltas(deltas, 2048))
    (trace,) = search(scanner, media, {"TOKEN": SECRET}, shapes=False)
    assert (trace.secret, trace.address, trace.medium.kind) == ("TOKEN", 4 * CLUSTER - cut, "disk")


def test_what_a_later_delta_hides_is_no_neighbour(scanner: Scanner, tmp_path: Path) -> None:
    one = overlay(tmp_path / "1", {3: SECRET[:16].rjust(CLUSTER, b"\2")})
    two = overlay(tmp_path / "2", {4: SECRET[16:]})
    three = overlay(tmp_path / "3", {}, zeros=(3,))
    deltas = [(p.name, p, list(clusters(p))) for p in (one, two, three)]
    assert list(across_deltas(deltas, 2048)) == []


def test_neighbours_in_the_guest_belong_together_wherever_they_lie(
    scanner: Scanner, tmp_path: Path
) -> None:
    path = tmp_path / "1"
    data = {7: SECRET[20:], 6: SECRET[:20].rjust(CLUSTER, b"\2")}
    overlay(path, data)
    medium = delta_medium(path, "one", list(clusters(path)))
    (trace,) = search(scanner, [medium], {"TOKEN": SECRET}, shapes=False)
    assert trace.address == 7 * CLUSTER - 20
    assert trace.medium.layer == "one"


def test_the_layered_disk_is_what_the_guest_sees(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(b"\5" * (2 * CLUSTER + 100))
    one = overlay(tmp_path / "1", {0: b"a", 3: b"b"})
    two = overlay(tmp_path / "2", {3: b"c"}, zeros=(0,))
    read = layered_disk(base, [(p, list(clusters(p))) for p in (one, two)])
    assert read(0, 4) == b"\0\0\0\0"
    assert read(CLUSTER, 4) == b"\5\5\5\5"
    assert read(2 * CLUSTER + 98, 4) == b"\5\5\0\0"
    assert read(3 * CLUSTER - 1, 3) == b"\0c\1"


def test_holes_are_not_searched(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        os.pwrite(file.fileno(), b"data", 32 << 20)
    medium = file_medium(path, "memory")
    assert sum(segment.length for segment in medium.segments) < 1 << 20
    assert medium.addresses[0] == medium.segments[0].offset
