from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.text import counted, visible


def test_counts_are_read_aloud_without_a_stumble():
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys(text):
    shown = visible(text)
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    assert len(shown) == len(text)


def test_escape_sequences_are_broken_and_text_stays():
    assert (
        visible("a\x1b[2Jb\tc\nd\r")
        == "a\N{REPLACEMENT CHARACTER}[2Jb\tc\nd\N{REPLACEMENT CHARACTER}"
    )
