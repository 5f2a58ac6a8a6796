import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.model.durations import milliseconds, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("2s", 2),
        ("5m", 300),
        ("1h", 3600),
        ("7d", 604800),
        ("42", 42),
        (42, 42),
        (" 10 s ", 10),
        ("0", 0),
        ("1ms", 0.001),
    ],
)
def test_durations(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "s",
        "5x",
        "1.5s",
        "-1",
        -1,
        "5 0s",
        "1h30m",
        "٣s",
        "5S",
        "9" * 50,
        10**30,
        "99999d",
        "1\n",
    ],
)
def test_junk_is_an_error_and_not_a_default(junk: str | int) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(junk)


@given(st.integers(0, 10**9))
def test_milliseconds_are_exact(count: int) -> None:
    assert milliseconds(parse_duration(f"{count}ms")) == count


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 20 << 30), ("512M", 512 << 20), ("1kb", 1024), ("7", 7), (7, 7), ("3 TiB", 3 << 40)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("junk", ["", "0", 0, -1, "1.5G", "GiB", "9999T", "1PiB", 10**20, "1 0G"])
def test_junk_sizes(junk: str | int) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(junk)
