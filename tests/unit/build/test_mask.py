"""Secrets in output are masked, however the output is cut."""

import itertools
import re

from hypothesis import example, given
from hypothesis import strategies as st

from smolbuild.build.mask import Masker, mask_text

needles = st.lists(st.binary(min_size=1, max_size=9).map(lambda b: bytes(c % 3 + 97 for c in b)))
texts = st.binary(max_size=80).map(lambda b: bytes(c % 4 + 97 for c in b))


def naive(stream: bytes, needles: list[bytes]) -> bytes:
    ordered = sorted(set(needles), key=lambda n: (-len(n), n))
    if not ordered:
        return stream
    return re.sub(b"|".join(map(re.escape, ordered)), b"***", stream)


@given(needles, texts, st.lists(st.integers(0, 80)))
@example([b"abc", b"abcabd"], b"xabcabc", [5])
@example([b"ab", b"bcd"], b"abcd", [3])
def test_the_result_does_not_depend_on_the_cuts(
    needles: list[bytes], stream: bytes, cuts: list[int]
) -> None:
    masker = Masker(needles)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    shown = b"".join(masker.feed(stream[a:b]) for a, b in itertools.pairwise(places))
    assert shown + masker.flush() == naive(stream, needles)


@given(st.binary(min_size=8, max_size=40), st.binary(max_size=30), st.integers(0, 60))
def test_a_secret_in_two_pieces_is_never_shown(secret: bytes, around: bytes, cut: int) -> None:
    stream = around + secret + around
    masker = Masker([secret])
    shown = masker.feed(stream[:cut]) + masker.feed(stream[cut:]) + masker.flush()
    if secret not in b"***".join([around, around]):
        assert secret not in shown


def test_what_cannot_be_a_beginning_is_shown_at_once() -> None:
    masker = Masker([b"secret-value"])
    assert masker.feed(b"password: ") == b"password: "
    assert masker.feed(b"secret-") == b""
    assert masker.feed(b"less\n") == b"secret-less\n"
    assert masker.flush() == b""


def test_nothing_to_mask_changes_nothing() -> None:
    assert Masker([]).feed(b"abc") == b"abc"
    assert mask_text("a \udcff b", [b"a "]) == "***\udcff b"
