"""The stat cache: it saves reading, and no edit gets past it, whatever its times say."""

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.core.digest import digest_bytes, digest_file
from smolbuild.source import stat_cache
from smolbuild.source.stat_cache import digest_files


class World:
    """A context directory, a cache, and which files were read."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.context, self.cache = root / "context", root / "cache"
        self.context.mkdir()
        self.cache.mkdir()
        self.read: list[str] = []
        original = stat_cache._read

        def noted(context, path):
            self.read.append(path)
            return original(context, path)

        monkeypatch.setattr(stat_cache, "_read", noted)

    def write(self, name: str, data: bytes) -> Path:
        path = self.context / name
        path.write_bytes(data)
        return path

    def digests(self):
        self.read.clear()
        found = {p.name: p.lstat() for p in self.context.iterdir()}
        return digest_files(self.context, found, self.cache)

    def settle(self) -> None:
        """Wait until the file system's clock has passed every file's times."""
        latest = max(max(p.lstat().st_ctime_ns, p.lstat().st_mtime_ns) for p in self.all())
        deadline = time.monotonic() + 10
        while (stat_cache._clock(self.context) or (0, 0))[1] <= latest:
            assert time.monotonic() < deadline

    def all(self) -> list[Path]:
        return list(self.context.iterdir())

    def true_digests(self):
        return {path.name: digest_file(path) for path in self.all()}

    def entries(self) -> Path:
        (path,) = (self.cache / "files").iterdir()
        return path


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    return World(tmp_path, monkeypatch)


def test_what_did_not_change_is_not_read_again(world):
    world.write("a", b"one")
    world.write("b", b"two")
    world.settle()
    assert world.digests() == world.true_digests()
    assert sorted(world.read) == ["a", "b"]
    assert world.digests() == world.true_digests()
    assert world.read == []
    world.write("b", b"three")
    assert world.digests() == world.true_digests()
    assert world.read == ["b"]


def restore_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_in_place(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(b"ONE")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"ONE")
    other.replace(path)


def delete_and_write(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"ONE")


def replace_by_an_older_file(path: Path) -> None:
    old = path.parent.parent / "older"
    old.rename(path)


@pytest.mark.parametrize(
    "edit", [edit_in_place, replace, delete_and_write, replace_by_an_older_file]
)
def test_an_edit_of_the_same_size_with_its_times_put_back_is_seen(world, edit):
    (world.context.parent / "older").write_bytes(b"ONE")
    path = world.write("a", b"one")
    world.settle()
    world.digests()
    before = path.stat()
    edit(path)
    restore_times(path, before)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (3, before.st_mtime_ns)
    assert world.digests() == {"a": digest_bytes(b"ONE")}


def test_edits_within_one_tick_of_the_clock_are_seen(world):
    path = world.context / "a"
    for number in range(100):
        data = b"%08d" % number
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
        assert world.digests() == {"a": digest_bytes(data)}


def test_a_file_as_young_as_the_clock_has_no_entry(world, monkeypatch):
    path = world.write("a", b"one")
    world.settle()
    status = path.stat()
    changed = max(status.st_ctime_ns, status.st_mtime_ns)
    for now, remembered in ((changed - 1, False), (changed, False), (changed + 1, True)):
        monkeypatch.setattr(stat_cache, "_clock", lambda _, now=now: (status.st_dev, now))
        world.digests()
        world.digests()
        assert (world.read == []) == remembered


@pytest.mark.parametrize("clock", [None, (-1, 1 << 62)])
def test_without_a_clock_of_the_files_own_system_nothing_is_trusted(world, monkeypatch, clock):
    monkeypatch.setattr(stat_cache, "_clock", lambda _: clock)
    world.write("a", b"one")
    for _ in range(2):
        assert world.digests() == world.true_digests()
        assert world.read == ["a"]


def test_the_clock_is_the_file_systems_where_it_has_no_unnamed_files(world, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    device, now = stat_cache._clock(world.context)
    assert device == world.context.stat().st_dev
    assert abs(now / 1e9 - time.time()) < 5
    assert world.all() == []


def test_a_file_that_changes_while_it_is_read_has_no_entry(world, monkeypatch):
    path = world.write("a", b"one")
    world.settle()
    original = stat_cache.digest_chunks

    def meddling(chunks):
        digest = original(chunks)
        path.write_bytes(b"ONE")
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(stat_cache, "digest_chunks", meddling)
        world.digests()
    assert world.digests() == {"a": digest_bytes(b"ONE")}


def test_what_is_no_file_any_more_is_an_error_and_not_awaited(world):
    path = world.write("a", b"one")
    found = {"a": path.lstat(), "gone": path.lstat()}
    path.unlink()
    os.mkfifo(path)
    digests = digest_files(world.context, found, world.cache)
    assert all(isinstance(digest, OSError) for digest in digests.values())
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert isinstance(digest_files(world.context, found, world.cache)["a"], OSError)


def test_many_files_are_read_in_parallel_and_right(world):
    for number in range(200):
        world.write(f"{number}", b"%d" % number * number)
    world.settle()
    assert world.digests() == world.true_digests()
    assert len(world.read) == 200
    assert world.digests() == world.true_digests()
    assert world.read == []


def test_names_of_any_kind_come_back(world):
    for name in ("line\nbreak", "with space", "ünïcode", "-", "a\tb"):
        world.write(name, name.encode())
    world.settle()
    world.digests()
    assert world.digests() == world.true_digests()
    assert world.read == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(cut=st.integers(0, 400), junk=st.binary(max_size=40))
def test_a_damaged_cache_is_no_cache(world, cut, junk):
    world.write("a", b"one")
    world.write("b", b"two")
    world.settle()
    world.digests()
    whole = world.entries().read_bytes()
    damaged = whole[: cut % len(whole)] + junk
    world.entries().write_bytes(damaged)
    assert world.digests() == world.true_digests()
    if damaged != whole:
        assert sorted(world.read) == ["a", "b"]


def test_entries_of_other_smolfiles_in_the_directory_are_kept(world):
    one, two = world.write("a", b"one"), world.write("b", b"two")
    world.settle()
    for path in (one, two, one, two):
        world.read.clear()
        digest_files(world.context, {path.name: path.lstat()}, world.cache)
    assert world.read == []


def test_the_cache_is_bounded(world, monkeypatch):
    monkeypatch.setattr(stat_cache, "_KEPT_CONTEXTS", 3)
    monkeypatch.setattr(stat_cache, "_MAX_ENTRIES", 2)
    for number in range(5):
        context = world.context.parent / f"context-{number}"
        context.mkdir()
        world.context = context
        world.write("a", b"one")
        world.settle()
        world.digests()
    assert len(list((world.cache / "files").iterdir())) == 3
    world.write("b", b"two")
    world.write("c", b"three")
    world.settle()
    for _ in range(2):  # more than fit: they are read each time, and nothing breaks
        assert world.digests() == world.true_digests()
    assert sorted(world.read) == ["b", "c"]


def test_builds_at_once_stay_right_while_files_change(world):
    for number in range(20):
        world.write(f"{number}", b"0")
    wrong: list[str] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            found = {p.name: p.lstat() for p in world.all()}
            for name, digest in digest_files(world.context, found, world.cache).items():
                if digest not in (digest_bytes(b"0"), digest_bytes(b"1")):
                    wrong.append(name)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        for number in range(20):
            path = world.context / f"{number}"
            with path.open("r+b") as stream:
                stream.write(b"1" if path.read_bytes() == b"0" else b"0")
            os.utime(path, ns=(7, 7))
    stop.set()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert world.digests() == world.true_digests()
