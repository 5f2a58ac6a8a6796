"""The step cache: only deltas that lie on each other are ever used together."""

import os

import pytest

from smolbuild.build.cache import StepCache, lineage_of
from smolbuild.build.cache_entry import SavedMemory, entries_in
from smolbuild.core.digest import digest_bytes
from smolbuild.machine.fake import FAKE_CONTRACT
from smolbuild.model.contract import Shape
from smolbuild.model.egress import EgressRecord

BASE = digest_bytes(b"base disk")
CHAIN = tuple(digest_bytes(b"link %d" % n) for n in range(3))
SHAPE = Shape(cpus=1, memory_mib=1, disk_bytes=1 << 20)


@pytest.fixture
def cache(tmp_path):
    with StepCache(tmp_path / "cache") as opened:
        yield opened


def keep(cache, key, below, *, memory=False, egress=()):
    """Keep one link as a build does, and return its entry."""
    directory = cache.stage()
    (directory / "disk.qcow2").write_bytes(directory.name.encode())
    saved = None
    if memory:
        with (directory / "memory").open("wb") as stream:
            stream.truncate(SHAPE.memory_mib << 20)
        (directory / "state").write_bytes(b"state")
        saved = SavedMemory(
            memory=directory / "memory",
            state=directory / "state",
            shape=SHAPE,
            contract=FAKE_CONTRACT,
            agent_cursor=b"cursor",
            zero_freed=False,
        )
    entry = cache.keep(directory, key, below, step="s", artifact="a", memory=saved, egress=egress)
    cache.settle()
    return entry


def run(cache, chain=CHAIN, base=BASE, first=(), **kept):
    """Do what a build does: keep a delta for each link over those of ``first``."""
    below = first[-1].token if first else lineage_of(base)
    made = []
    for key in chain[len(first) :]:
        entry = keep(cache, key, below, **kept)
        below = entry.token
        made.append(entry.disk.read_bytes())
    return made


def found(cache, chain=CHAIN, base=BASE):
    return [step.path.read_bytes() for step in cache.prefix(chain, base)]


def test_a_finished_chain_is_found_whole(cache):
    assert cache.prefix(CHAIN, BASE) == ()
    made = run(cache)
    assert found(cache) == made
    assert found(cache, base=None) == made


def test_a_step_that_ran_again_takes_no_delta_that_lay_on_its_old_disk(cache):
    run(cache)
    cache.prefix(CHAIN, BASE)[1].path.unlink()
    first = cache.prefix(CHAIN, BASE)
    assert len(first) == 1
    made = run(cache, CHAIN[:2], first=first)
    # The third delta is still there, but it lies on the disk that is gone.
    assert found(cache)[1:] == made


def test_builds_side_by_side_do_not_mix_their_deltas(cache):
    below = [lineage_of(BASE), lineage_of(BASE)]
    made: list[list[bytes]] = [[], []]
    for key in CHAIN:
        for build in (0, 1):
            entry = keep(cache, key, below[build])
            below[build] = entry.token
            made[build].append(entry.disk.read_bytes())
    assert found(cache) in made


def test_the_longest_stack_wins(cache):
    whole = run(cache)
    for _ in range(5):
        run(cache, CHAIN[:2])
    assert found(cache) == whole


def test_of_stacks_as_long_the_one_with_a_saved_machine_wins(cache):
    with_memory = run(cache, memory=True)
    run(cache)
    assert found(cache) == with_memory
    last = cache.prefix(CHAIN, BASE)[-1]
    assert last.memory is not None
    assert last.memory.agent_cursor == b"cursor"
    assert last.memory.contract == FAKE_CONTRACT


@pytest.mark.parametrize("name", ["memory", "state"])
def test_a_saved_machine_that_was_cut_short_is_none_and_its_disk_stays(cache, name):
    run(cache, memory=True)
    with (cache.prefix(CHAIN, BASE)[-1].entry.path / name).open("r+b") as stream:
        stream.truncate(1)
    steps = cache.prefix(CHAIN, BASE)
    assert len(steps) == 3
    assert steps[-1].memory is None
    steps[0].entry.drop_memory()
    assert cache.prefix(CHAIN, BASE)[0].memory is None


def test_another_base_disk_has_no_deltas(cache):
    run(cache)
    assert cache.prefix(CHAIN, digest_bytes(b"another base disk")) == ()


def test_forgetting_a_chain_takes_what_other_chains_laid_on_it(cache, tmp_path):
    run(cache)
    other = (*CHAIN[:2], digest_bytes(b"another third step"))
    run(cache, other, first=cache.prefix(other, BASE))
    stranger = (digest_bytes(b"elsewhere"),)
    kept = run(cache, stranger)
    assert len(cache.prefix(other, BASE)) == 3
    cache.forget(CHAIN)
    assert cache.prefix(other, BASE) == ()
    assert found(cache, stranger) == kept
    assert len(list((tmp_path / "cache" / "steps").iterdir())) == 1


def test_a_delta_that_was_cut_short_is_none(cache):
    made = run(cache)
    with cache.prefix(CHAIN, BASE)[1].path.open("r+b") as stream:
        stream.truncate(3)
    assert found(cache) == made[:1]


def test_what_a_step_asked_of_the_network_comes_back_with_its_delta(cache):
    asked = (
        EgressRecord(host="a.example", port=80, url="http://a.example/x", status=200, sent=1),
        EgressRecord(host="b.example", port=53, status=403, denied=True, requests=7),
    )
    keep(cache, CHAIN[0], lineage_of(BASE), egress=asked)
    (step,) = cache.prefix(CHAIN, BASE)
    assert step.egress == asked
    # Nobody can tell any more what the step asked: it must run again.
    (step.entry.path / "entry.json").write_text("{")
    assert cache.prefix(CHAIN, BASE) == ()


def test_what_was_made_too_long_ago_is_not_used_nor_what_lies_on_it(cache):
    run(cache)
    second = cache.prefix(CHAIN, BASE)[1].entry.path / "entry.json"
    os.utime(second, (1000.0, 1000.0))
    assert len(cache.prefix(CHAIN, BASE, since=1000.0)) == 3
    assert len(cache.prefix(CHAIN, BASE, since=1001.0)) == 1


def test_what_is_borrowed_outlives_its_entry(cache, tmp_path):
    made = run(cache)
    borrowed = cache.borrow(cache.prefix(CHAIN, BASE), tmp_path)
    cache.forget(CHAIN)
    assert cache.prefix(CHAIN, BASE) == ()
    assert [step.path.read_bytes() for step in borrowed] == made


def test_what_is_staged_and_never_kept_goes(tmp_path):
    with StepCache(tmp_path) as cache:
        directory = cache.stage()
        (directory / "disk.qcow2").write_bytes(b"half")
        assert list(entries_in(directory.parent)) == []
    assert not directory.exists()


def test_an_entry_appears_when_it_is_on_the_disk(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(5, "broken disk")

    with StepCache(tmp_path) as cache:
        monkeypatch.setattr("smolbuild.build.cache.os.fsync", refuse)
        with pytest.raises(OSError, match="broken disk"):
            keep(cache, CHAIN[0], lineage_of(BASE))
        monkeypatch.undo()
        assert cache.prefix(CHAIN, BASE) == ()
    assert list((tmp_path / "steps").iterdir()) == []
