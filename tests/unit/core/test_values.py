"""Our dataclasses behave as the standard library's, whatever is done with them first."""

import copy
import dataclasses
import pickle
from dataclasses import field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """A value."""

    name: str
    size: int = 3
    tags: list[str] = field(default_factory=list)
    line: int = field(default=0, compare=False)
    secret: str = field(default="s", repr=False)

    @property
    def double(self) -> int:
        """Return twice the size."""
        return 2 * self.size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """A value."""

    name: str
    size: int = 3
    tags: list[str] = field(default_factory=list)
    line: int = field(default=0, compare=False)
    secret: str = field(default="s", repr=False)


@dataclass(frozen=True, slots=True)
class Pair:
    left: int
    right: int = 2

    def __post_init__(self) -> None:
        if self.left < 0:
            raise ValueError("negative")


@dataclass(frozen=True, slots=True)
class Triple(Pair):
    third: int = 3


@dataclass(slots=True)
class Mutable:
    count: int = 0


@dataclass(frozen=True, slots=True)
class Empty:
    pass


given_fields = st.fixed_dictionaries(
    {"name": st.text(max_size=3)},
    optional={
        "size": st.integers(0, 2),
        "tags": st.lists(st.text(max_size=2), max_size=2),
        "line": st.integers(0, 2),
        "secret": st.text(max_size=2),
    },
)


@given(given_fields, given_fields)
def test_it_compares_and_prints_as_the_standard_library_does(one, two):
    ours, theirs = (Ours(**one), Ours(**two)), (Theirs(**one), Theirs(**two))
    assert (ours[0] == ours[1]) == (theirs[0] == theirs[1])
    assert repr(ours[0]).removeprefix("Ours") == repr(theirs[0]).removeprefix("Theirs")
    assert dataclasses.asdict(ours[0]) == dataclasses.asdict(theirs[0])
    other = dataclasses.replace(ours[0], size=9)
    assert (other.size, other.name) == (9, one["name"])
    assert ours[0] != theirs[0]


def test_fields_are_those_of_the_standard_library():
    def described(kind):
        return [
            (f.name, f.default, f.default_factory, f.compare, f.kw_only)
            for f in dataclasses.fields(kind)
        ]

    assert described(Ours) == described(Theirs)
    assert dataclasses.is_dataclass(Ours)
    assert Ours.__doc__ == "A value."
    assert Pair.__doc__ == "Pair"


def test_a_default_factory_makes_a_new_one_each_time():
    one, two = Ours(name="a"), Ours(name="b")
    assert one.tags is not two.tags
    assert one.double == 6


def test_frozen_values_do_not_change_and_have_no_other_attributes():
    value = Pair(1)
    for change in (
        lambda: setattr(value, "left", 2),
        lambda: setattr(value, "unknown", 2),
        lambda: delattr(value, "left"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert not hasattr(value, "__dict__")
    with pytest.raises(AttributeError):
        Mutable().unknown = 1


def test_hashes_agree_with_equality():
    assert len({Pair(1), Pair(1, 2), Pair(1, 3), Empty(), Empty()}) == 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(Mutable())
    counter = Mutable()
    counter.count += 1
    assert counter == Mutable(1)


@pytest.mark.parametrize(
    "call",
    [
        Ours,
        lambda: Ours("a"),
        lambda: Ours(name="a", nothing=1),
        lambda: Pair(1, 2, 3),
    ],
)
def test_wrong_arguments_are_errors_at_the_first_call_and_later(call):
    for _ in range(2):
        with pytest.raises(TypeError, match="__init__"):
            call()


def test_inheritance_and_post_init():
    assert Triple(1, 2, 4) == Triple(1, third=4)
    assert Triple(1) != Pair(1)
    assert [f.name for f in dataclasses.fields(Triple)] == ["left", "right", "third"]
    for kind in (Pair, Triple):
        with pytest.raises(ValueError, match="negative"):
            kind(-1)


def test_copies_and_pickles():
    for value in (Ours(name="a", tags=["b"]), Pair(1), Empty(), Triple(5)):
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value


def test_what_is_not_supported_is_refused():
    with pytest.raises(TypeError, match="slots"):

        @dataclass(slots=False)
        class _Open:
            pass

    with pytest.raises(TypeError, match="__init__ does not take"):

        @dataclass(slots=True)
        class _Hidden:
            value: int = field(default=1, init=False)
