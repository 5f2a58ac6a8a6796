from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    path: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    digest: Digest
    two_words: tuple[tuple[str, int], ...]
    side: Left | Right
    maybe: Left | None = None
    mode: Literal["on", "off"] = "on"
    seconds: float = 1.0
    switch: bool | tuple[str, ...] | None = None
    notes: Mapping[str, int] = field(default_factory=dict)


wholes = st.builds(
    Whole,
    digest=st.text().map(Digest),
    two_words=st.lists(st.tuples(st.text(), st.integers())).map(tuple),
    side=st.builds(Left, port=st.integers()) | st.builds(Right, path=st.text()),
    maybe=st.none() | st.builds(Left, port=st.integers()),
    mode=st.sampled_from(["on", "off"]),
    seconds=st.floats(allow_nan=False),
    switch=st.none() | st.booleans() | st.lists(st.text()).map(tuple),
    notes=st.dictionaries(st.text(), st.integers()),
)


@given(wholes)
def test_round_trips(value):
    assert decode(Whole, encode(value), "w") == value


def test_names_and_tags():
    value = encode(Whole(digest=Digest("x"), two_words=(), side=Right()))
    assert value["twoWords"] == []
    assert value["side"] == {"right": {"path": "/"}}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"extra": 1}, "unknown member 'extra'"),
        ({"digest": 3}, "w.digest: expected str"),
        ({"twoWords": [["a", True]]}, "w.twoWords[0][1]: expected int, got bool"),
        ({"twoWords": [["a"]]}, "w.twoWords[0]: expected 2 entries"),
        ({"side": {"up": {}}}, "unknown kind 'up'"),
        ({"side": {"left": {"port": 1}, "right": {}}}, "one member"),
        ({"mode": "maybe"}, "expected one of 'on', 'off'"),
        ({"maybe": []}, "w.maybe: expected an object"),
        ({"notes": {"a": "b"}}, "w.notes.a"),
    ],
)
def test_says_where_it_does_not_fit(change, where):
    good = encode(Whole(digest=Digest("x"), two_words=(), side=Left(port=1)))
    with pytest.raises(VerificationError) as caught:
        decode(Whole, {**good, **change}, "w")
    assert where in caught.value.message


def test_a_missing_member_is_named():
    with pytest.raises(VerificationError, match="'digest' is missing"):
        decode(Whole, {"twoWords": [], "side": {"right": {}}}, "w")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
def test_foreign_json_is_only_ever_our_error(value):
    with pytest.raises(VerificationError):
        decode(Whole, value, "w")
