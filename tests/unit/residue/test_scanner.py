"""The scanner finds what a naive search finds, however files are cut and cores share the work."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import HostError
from smolbuild.residue import scanner as scanning
from smolbuild.residue.scanner import Find, Needle, Scanner, Segment

ALPHABET = b"ab\0"


def letters(most: int, least: int = 0) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(ALPHABET), min_size=least, max_size=most).map(bytes)


needles = st.lists(
    st.builds(
        Needle,
        data=letters(12, 3),
        run=st.integers(0, 3),
        follow=st.sampled_from([b"a", b"ab", ALPHABET]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scanner")


def naive(needles: Sequence[Needle], segments: Sequence[Segment]) -> list[Find]:
    """Search each run of joined segments, read whole."""
    finds = []
    runs: list[list[int]] = []
    for index, segment in enumerate(segments):
        if segment.joined and runs:
            runs[-1].append(index)
        else:
            runs.append([index])
    for run in runs:
        parts = [read(segments[index]) for index in run]
        text = b"".join(parts)
        starts = [0, *itertools.accumulate(map(len, parts))]
        for number, needle in enumerate(needles):
            for at in range(len(text)):
                after = text[at + len(needle.data) :][: needle.run]
                if (
                    text.startswith(needle.data, at)
                    and len(after) == needle.run
                    and all(byte in needle.follow for byte in after)
                ):
                    place = max(n for n, start in enumerate(starts[:-1]) if start <= at)
                    finds.append(Find(number, run[place], at - starts[place]))
    return sorted(finds)


def read(segment: Segment) -> bytes:
    data = segment.file.read_bytes()[segment.offset :][: segment.length]
    return data.ljust(segment.length, b"\0")


@pytest.mark.parametrize("lanes", ["1", "16", "32"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(needles=needles, text=letters(400, 1), cuts=st.lists(st.integers(0, 400)), data=st.data())
def test_it_finds_what_a_naive_search_finds(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lanes: str,
    needles: list[Needle],
    text: bytes,
    cuts: list[int],
    data: st.DataObject,
) -> None:
    monkeypatch.setenv("SMOLBUILD_SCAN_LANES", lanes)
    monkeypatch.setattr(scanning, "_SMALLEST_SHARE", data.draw(st.integers(5, 200)))
    file = tmp_path / "text"
    file.write_bytes(text)
    places = sorted({0, len(text) + 5, *(min(cut, len(text)) for cut in cuts)})
    segments = [
        Segment(file=file, offset=a, length=b - a, joined=data.draw(st.booleans()))
        for a, b in itertools.pairwise(places)
    ]
    found = Scanner(cache, workers=3).find(needles, segments)
    assert found == naive(needles, segments)


@pytest.mark.parametrize("lanes", ["1", "16", "32"])
def test_across_its_own_buffers(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    monkeypatch.setenv("SMOLBUILD_SCAN_LANES", lanes)
    file = tmp_path / "large"
    size, needle = 5 << 20, b"a needle that is looked for"
    places = [0, (1 << 20) - 13, (2 << 20) - 1, 2 << 20, (3 << 20) + 100, size - len(needle)]
    content = bytearray(size)
    for place in places:
        content[place : place + len(needle)] = needle
    file.write_bytes(content)
    segments = [Segment(file=file, offset=0, length=size)]
    found = Scanner(cache, workers=1).find([Needle(data=needle)], segments)
    expected = [p for p in places if content[p : p + len(needle)] == needle]
    assert [find.offset for find in found] == expected


def test_a_file_that_is_not_there_fails_loudly(cache: Path, tmp_path: Path) -> None:
    segments = [Segment(file=tmp_path / "missing", offset=0, length=10)]
    with pytest.raises(HostError, match="search for residue failed") as raised:
        Scanner(cache).find([Needle(data=b"the secret itself")], segments)
    assert "the secret itself" not in raised.value.message + raised.value.details


def test_a_needle_does_not_show_itself() -> None:
    assert "hunter2hunter2" not in repr(Needle(data=b"hunter2hunter2"))
