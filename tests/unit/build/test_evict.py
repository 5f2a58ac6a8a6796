"""The cap of the step cache: longest unused first, leaves before their ground, nothing in use."""

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.build.cache import StepCache, steps_root
from smolbuild.build.cache_entry import Entry, hold, write_record
from smolbuild.build.evict import evict, list_cache
from smolbuild.core.digest import digest_bytes

KIB = 1024
numbers = itertools.count()


def entry(cache, below="base", *, used, resumed=None):
    """Make an entry of 64 KiB disk, and 128 KiB memory when it was ``resumed``."""
    name = f"t{next(numbers)}"
    made = Entry.of(steps_root(cache), digest_bytes(name.encode()), below, name)
    made.path.mkdir()
    made.disk.write_bytes(b"d" * 64 * KIB)
    write_record(made.path, step=name, artifact="a", egress=(), saved=None)
    if resumed is not None:
        (made.path / "memory").write_bytes(b"m" * 124 * KIB)
        (made.path / "state").write_bytes(b"s" * 4 * KIB)
        os.utime(made.path / "state", (resumed, resumed))
    os.utime(made.disk, (used, used))
    return made


def left(cache):
    return {item.token for item in list_cache(cache)}


def test_the_memory_or_disk_used_longest_ago_goes_first(tmp_path):
    old = entry(tmp_path, used=10, resumed=10)
    young = entry(tmp_path, used=50, resumed=20)
    whole = sum(item.disk_bytes + item.memory_bytes for item in list_cache(tmp_path))
    done = evict(tmp_path, max_bytes=whole - 1)
    assert (done.steps, done.memories) == (0, 1)
    assert not (old.path / "memory").exists()
    done = evict(tmp_path, max_bytes=done.left - 1)
    assert (done.steps, done.memories) == (1, 0)
    assert left(tmp_path) == {young.token}
    assert (young.path / "memory").exists()
    done = evict(tmp_path, max_bytes=done.left - 1)
    assert (done.steps, done.memories) == (0, 1)
    assert evict(tmp_path, max_bytes=0).left == 0


def test_a_disk_goes_after_what_lies_on_it(tmp_path):
    below = entry(tmp_path, used=1)
    above = entry(tmp_path, below.token, used=99)
    size = list_cache(tmp_path)[0].disk_bytes
    evict(tmp_path, max_bytes=size)
    assert left(tmp_path) == {below.token}
    assert above.path.exists() is False


def test_what_a_build_uses_or_has_just_made_stays(tmp_path):
    used, free = entry(tmp_path, used=1, resumed=1), entry(tmp_path, used=2)
    held = hold(used.path)
    with StepCache(tmp_path) as cache:
        directory = cache.stage()
        (directory / "disk.qcow2").write_bytes(b"d" * 64 * KIB)
        made = cache.keep(directory, digest_bytes(b"k"), "base", step="s", artifact="a")
        cache.settle()
        done = evict(tmp_path, max_bytes=0)
        assert left(tmp_path) == {used.token, made.token}
        assert done.left == done.in_use > 64 * KIB
        assert not free.path.exists()
    os.close(held)
    assert evict(tmp_path, max_bytes=0).left == 0


def test_what_was_not_used_lately_goes_whatever_the_size(tmp_path):
    old, young = entry(tmp_path, used=10), entry(tmp_path, used=30)
    assert evict(tmp_path, max_bytes=1 << 40, older_than=20.0, dry_run=True).steps == 1
    assert left(tmp_path) == {old.token, young.token}
    assert evict(tmp_path, max_bytes=1 << 40, older_than=20.0).steps == 1
    assert left(tmp_path) == {young.token}


def test_damaged_entries_are_listed_and_go(tmp_path):
    broken = entry(tmp_path, used=5)
    (broken.path / "entry.json").write_text("{")
    (item,) = list_cache(tmp_path)
    assert (item.step, item.artifact) == ("", "")
    assert evict(tmp_path, max_bytes=0).steps == 1


TREES = st.lists(
    st.tuples(st.integers(-1, 5), st.integers(0, 20), st.one_of(st.none(), st.integers(0, 20))),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(TREES, st.integers(0, 2000))
def test_what_is_said_is_done_and_nothing_is_left_hanging(tmp_path_factory, tree, kib):
    cache = tmp_path_factory.mktemp("cache")
    made = []
    for parent, used, resumed in tree:
        below = made[parent].token if 0 <= parent < len(made) else "base"
        made.append(entry(cache, below, used=used, resumed=resumed))
    said = evict(cache, max_bytes=kib * KIB, dry_run=True)
    assert len(list_cache(cache)) == len(made)
    done = evict(cache, max_bytes=kib * KIB)
    assert done == said
    items = list_cache(cache)
    assert done.left == sum(item.disk_bytes + item.memory_bytes for item in items)
    assert done.left <= kib * KIB
    tokens = {item.token for item in items} | {"base"}
    assert all(each.below in tokens for each in made if each.token in tokens)
    assert evict(cache, max_bytes=kib * KIB).freed == 0


@pytest.mark.parametrize("turn", range(3))
def test_an_entry_that_vanishes_meanwhile_is_no_error(tmp_path, monkeypatch, turn):
    entries = [entry(tmp_path, used=n) for n in range(3)]
    real = Entry.remove

    def remove(self):
        real(entries[turn])  # another eviction was quicker
        real(self)

    monkeypatch.setattr(Entry, "remove", remove)
    evict(tmp_path, max_bytes=0)
    assert left(tmp_path) == set()
