"""The step cache: only deltas that lie on each other are ever used together."""

import itertools
import os

from smolbuild.build.cache import StepCache, lineage_of
from smolbuild.core.digest import digest_bytes
from smolbuild.model.egress import EgressRecord

BASE = digest_bytes(b"base disk")
CHAIN = tuple(digest_bytes(b"link %d" % n) for n in range(3))
numbers = itertools.count()


def overlay(tmp_path):
    path = tmp_path / f"overlay-{next(numbers)}"
    path.write_bytes(path.name.encode())
    return path


def run(cache, tmp_path, chain=CHAIN, base=BASE, first=()):
    """Do what a build does: keep a delta for each link over those of ``first``."""
    below = first[-1].token if first else lineage_of(base)
    made = []
    for key in chain[len(first) :]:
        path = overlay(tmp_path)
        below = cache.keep(key, below, path)
        made.append(path.read_bytes())
    return made


def found(cache, chain=CHAIN, base=BASE):
    return [delta.path.read_bytes() for delta in cache.prefix(chain, base)]


def test_a_finished_chain_is_found_whole(tmp_path):
    cache = StepCache(tmp_path / "cache")
    assert cache.prefix(CHAIN, BASE) == ()
    made = run(cache, tmp_path)
    assert found(cache) == made
    assert found(cache, base=None) == made


def test_a_step_that_ran_again_takes_no_delta_that_lay_on_its_old_disk(tmp_path):
    cache = StepCache(tmp_path / "cache")
    run(cache, tmp_path)
    cache.prefix(CHAIN, BASE)[1].path.unlink()
    first = cache.prefix(CHAIN, BASE)
    assert len(first) == 1
    made = run(cache, tmp_path, CHAIN[:2], first=first)
    # The third delta is still there, but it lies on the disk that is gone.
    assert found(cache)[1:] == made


def test_builds_side_by_side_do_not_mix_their_deltas(tmp_path):
    cache = StepCache(tmp_path / "cache")
    below = [lineage_of(BASE), lineage_of(BASE)]
    made: list[list[bytes]] = [[], []]
    for key in CHAIN:
        for build in (0, 1):
            path = overlay(tmp_path)
            below[build] = cache.keep(key, below[build], path)
            made[build].append(path.read_bytes())
    assert found(cache) in made


def test_the_longest_stack_wins(tmp_path):
    cache = StepCache(tmp_path / "cache")
    whole = run(cache, tmp_path)
    for _ in range(5):
        run(cache, tmp_path, CHAIN[:2])
    assert found(cache) == whole


def test_another_base_disk_has_no_deltas(tmp_path):
    cache = StepCache(tmp_path / "cache")
    run(cache, tmp_path)
    assert cache.prefix(CHAIN, digest_bytes(b"another base disk")) == ()


def test_forgetting_a_chain_takes_what_other_chains_laid_on_it(tmp_path):
    cache = StepCache(tmp_path / "cache")
    run(cache, tmp_path)
    other = (*CHAIN[:2], digest_bytes(b"another third step"))
    run(cache, tmp_path, other, first=cache.prefix(other, BASE))
    stranger = (digest_bytes(b"elsewhere"),)
    kept = run(cache, tmp_path, stranger)
    assert len(cache.prefix(other, BASE)) == 3
    cache.forget(CHAIN)
    assert cache.prefix(other, BASE) == ()
    assert found(cache, stranger) == kept
    assert len(list((tmp_path / "cache" / "steps").glob("*.qcow2"))) == 1
    assert len(list((tmp_path / "cache" / "steps").iterdir())) == 2


def test_a_delta_that_was_cut_short_is_none(tmp_path):
    cache = StepCache(tmp_path / "cache")
    made = run(cache, tmp_path)
    with cache.prefix(CHAIN, BASE)[1].path.open("r+b") as stream:
        stream.truncate(3)
    assert found(cache) == made[:1]


def test_what_a_step_asked_of_the_network_comes_back_with_its_delta(tmp_path):
    cache = StepCache(tmp_path / "cache")
    asked = (
        EgressRecord(host="a.example", port=80, url="http://a.example/x", status=200, sent=1),
        EgressRecord(host="b.example", port=53, status=403, denied=True, requests=7),
    )
    cache.keep(CHAIN[0], lineage_of(BASE), overlay(tmp_path), egress=asked)
    (delta,) = cache.prefix(CHAIN, BASE)
    assert delta.egress == asked
    # Nobody can tell any more what the step asked: it must run again.
    delta.path.with_suffix(".json").write_text("{")
    assert cache.prefix(CHAIN, BASE) == ()


def test_what_was_made_too_long_ago_is_not_used_nor_what_lies_on_it(tmp_path):
    cache = StepCache(tmp_path / "cache")
    run(cache, tmp_path)
    second = cache.prefix(CHAIN, BASE)[1].path.with_suffix(".json")
    os.utime(second, (1000.0, 1000.0))
    assert len(cache.prefix(CHAIN, BASE, since=1000.0)) == 3
    assert len(cache.prefix(CHAIN, BASE, since=1001.0)) == 1
