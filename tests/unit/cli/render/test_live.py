"""What the live display leaves on a terminal's screen."""

import io
import os
import pty

import pyte
import pytest

from smolbuild.cli import render
from smolbuild.cli.render.live import Display, live_display
from smolbuild.core.events import (
    Message,
    Output,
    PhaseFinished,
    PhaseStarted,
    StepFinished,
    StepStarted,
    Transfer,
)


class Terminal(io.TextIOWrapper):
    """A terminal of which every picture can be looked at; wraps anew when its width changes."""

    def __init__(self, columns=60, lines=12, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self.time = 100.0
        self.writes = 0
        self._begin(columns, lines)

    def _begin(self, columns, lines):
        self.screen = pyte.Screen(columns, lines)
        self.screen.set_mode(pyte.modes.LNM)  # as a tty's output does: \n is also \r
        self.feed = pyte.Stream(self.screen).feed

    def write(self, text):
        text.encode(self.encoding)
        self.writes += 1
        self.feed(text)
        return len(text)

    def size(self):
        return os.terminal_size((self.screen.columns, self.screen.lines))

    def resize(self, columns):
        shown = self.shown()
        self._begin(columns, self.screen.lines)
        self.feed("".join(f"{line}\n" for line in shown))

    def shown(self):
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def display(self, *, colour=False):
        return Display(self, colour=colour, size=self.size, now=lambda: self.time)


@pytest.fixture
def terminal():
    return Terminal()


def started(name="one", number=1, total=3, *, cached=False):
    return StepStarted(name=name, number=number, total=total, cached=cached)


def output(data, source="one"):
    return Output(source=source, stream="stdout", data=data)


def test_one_line_per_step(terminal):
    display = terminal.display()
    display(PhaseStarted(phase="boot", text="booting"))
    terminal.time += 2
    display(PhaseFinished(phase="boot", text="booting", seconds=2.0))
    display(PhaseStarted(phase="steps", text="2 steps to run"))
    display(started(cached=True))
    display(started("two", 2))
    display(Transfer(what="copy", done=1_500_000, total=0))
    display(output(b"first\nsecond\n", "two"))
    terminal.time += 3.25
    display.refresh()
    assert terminal.shown() == [
        "✓ boot: booting  2.0 s",
        "✓ step 1/3 one  cached",
        "⠙ step 2/3 two  3.2 s  copy: 1.5 MB  second",
    ]
    display(output(b"third", "two"))
    terminal.time += 1
    display.refresh()
    assert terminal.shown()[2:] == ["⠹ step 2/3 two  4.2 s  copy: 1.5 MB  third"]
    display(StepFinished(name="two", seconds=4.3, status=0))
    display(started("three", 3))
    display.refresh()
    assert terminal.shown()[2:] == [
        "✓ step 2/3 two  4.3 s  copy: 1.5 MB",
        "⠸ step 3/3 three  0.0 s",
    ]
    display(StepFinished(name="three", seconds=0.5, status=0))
    display(PhaseFinished(phase="steps", text="2 steps to run", seconds=5.0))
    display.close()
    assert terminal.shown() == [
        "✓ boot: booting  2.0 s",
        "✓ step 1/3 one  cached",
        "✓ step 2/3 two  4.3 s  copy: 1.5 MB",
        "✓ step 3/3 three  0.5 s",
        "✓ steps: 2 steps to run  5.0 s",
    ]


def test_what_fails_keeps_a_line(terminal):
    display = terminal.display()
    display(PhaseStarted(phase="steps", text="1 step to run"))
    display(started())
    display.refresh()
    display(StepFinished(name="one", seconds=1.0, status=3))
    display.fail()
    display.close()
    assert terminal.shown() == ["✗ step 1/3 one  1.0 s  status 3", "✗ steps: 1 step to run  0.0 s"]
    other = Terminal()
    display = other.display()
    display(PhaseStarted(phase="boot", text="booting"))
    display.refresh()
    other.time += 9
    display.fail()
    display.close()
    assert other.shown() == ["✗ boot: booting  9.0 s"]


def test_a_phase_inside_one_of_its_name_is_one_line(terminal):
    display = terminal.display()
    display(PhaseStarted(phase="base", text="preparing"))
    display(PhaseStarted(phase="base", text="base debian"))
    display.refresh()
    assert len(terminal.shown()) == 2
    display(PhaseFinished(phase="base", text="root disk", seconds=1))
    display(PhaseFinished(phase="base", text="preparing", seconds=2))
    display.close()
    assert terminal.shown() == ["✓ base: preparing  2.0 s"]


@pytest.mark.parametrize("columns", [10, 17, 24, 40, 79])
def test_no_line_is_wider_than_the_terminal(columns):
    terminal = Terminal(columns)
    display = terminal.display()
    display(started("a-step-with-quite-a-long-name", 1))
    display(started("幅広い文字" * 8, 2))
    display(output(("長い" * 60).encode(), "幅広い文字" * 8))
    display(output(b"e\xcc\x81" * 100, "a-step-with-quite-a-long-name"))
    for _ in range(5):
        terminal.time += 40
        display.refresh()
        shown = terminal.shown()
        assert len(shown) == 2, shown
        assert all(line[0] in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" for line in shown)
    display.close()
    assert terminal.shown() == []


def test_a_picture_is_drawn_over_the_last_one_also_after_the_width_changed(terminal):
    display = terminal.display()
    display(started("first", 1))
    display(output(b"x" * 200, "first"))
    display(started("second", 2))
    display(output(b"y" * 200, "second"))
    for columns in (60, 33, 20, 12, 60):
        terminal.resize(columns)
        display.refresh()
        shown = terminal.shown()
        assert len(shown) == 2, (columns, shown)
        assert "step" in shown[0]
        assert "step" in shown[1]


def test_more_lines_than_the_screen_has_are_cut_and_leave_nothing(terminal):
    display = terminal.display()
    for number in range(1, 31):
        display(started(f"s{number}", number, 30))
    display.refresh()
    display.refresh()
    assert terminal.shown()[-1].startswith("⠹ step 30/30 s30")
    for number in range(1, 31):
        display(StepFinished(name=f"s{number}", seconds=1, status=0))
    display.close()
    assert terminal.shown()[-1] == "✓ step 30/30 s30  1.0 s"
    assert not any("⠹" in line for line in terminal.shown())


def test_messages_stay_whole_above_what_is_going_on(terminal):
    display = terminal.display()
    display(started())
    display.refresh()
    display(Message(level="warning", text="word " * 20 + "end"))
    display(Message(level="info", text="two\nlines"))
    display.refresh()
    shown = terminal.shown()
    assert " ".join("".join(shown[:2]).split()) == "warning: " + "word " * 20 + "end"
    assert shown[2:4] == ["  two", "lines"]
    assert shown[4] == "⠹ step 1/3 one  0.0 s"


def test_a_guest_commands_nothing(terminal):
    display = terminal.display()
    display(started("\x1b[2Jn\nm", 1))
    display(output(b"\x1b[31mred\x07\x1b[1A\x9b1A", "\x1b[2Jn\nm"))
    display.refresh()
    (line,) = terminal.shown()
    assert "�[2Jn m" in line
    assert "red" in line
    assert line.endswith("\\x9b1A")


def test_colours_only_where_they_are_wanted(terminal):
    seen = []
    terminal.feed = seen.append
    for colour in (True, False):
        display = terminal.display(colour=colour)
        display(started(cached=True))
        display.refresh()
        display.close()
    coloured, plain = seen[0], seen[-1]
    assert "\x1b[36m" in coloured
    assert "m" not in plain.replace("✓ step 1/3 one  cached", "")


def test_a_terminal_without_unicode_gets_letters():
    terminal = Terminal(encoding="latin-1")
    display = terminal.display()
    display(started("x" * 100))
    display(started(cached=True))
    display.refresh()
    shown = terminal.shown()
    assert shown[0] == "+ step 1/3 one  cached"
    assert shown[1].startswith("/ step 1/3 xxx")


def test_each_picture_is_one_write_that_erases_nothing_it_redraws(terminal):
    display = terminal.display()
    display(started())
    display.refresh()
    seen = []
    terminal.feed = seen.append
    before = terminal.writes
    display.refresh()
    assert terminal.writes == before + 1
    assert seen[0].startswith("\x1b[1A\r\x1b[?7l⠹ step")
    assert seen[0].endswith("\x1b[K\n\x1b[?7h\x1b[J")


def test_a_command_that_is_over_at_once_draws_nothing_but_says_what_there_is(terminal):
    display = terminal.display()
    display(PhaseStarted(phase="resolve", text="resolving"))
    assert not display.begin.is_set()
    display(Message(level="warning", text="beware"))
    display(PhaseFinished(phase="resolve", text="resolving", seconds=0.01))
    display.close()
    assert terminal.shown() == ["warning: beware"]


def test_the_first_step_begins_the_picture_a_cached_one_does_not(terminal):
    display = terminal.display()
    display(started(cached=True))
    assert not display.begin.is_set()
    display(started())
    assert display.begin.is_set()


def test_what_ran_when_the_block_failed_is_marked(terminal):
    def fail():
        with live_display(terminal, {}) as display:
            display(started())
            display.refresh()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [line[:14] for line in terminal.shown()] == ["✗ step 1/3 one"]


@pytest.mark.parametrize(
    ("environment", "live"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "CI": "true"}, False),
    ],
)
def test_only_a_terminal_that_can_is_drawn_on(monkeypatch, environment, live):
    ours, theirs = pty.openpty()
    try:
        with open(theirs, "w", closefd=False) as stream:
            monkeypatch.setattr("sys.stderr", stream)
            with render.progress("auto", environment) as emit:
                emit(started())
                emit(StepFinished(name="one", seconds=1, status=0))
                assert isinstance(emit, Display) is live
        os.write(theirs, b"end")
        shown = b""
        while not shown.endswith(b"end"):
            shown += os.read(ours, 4096)
        assert (b"\x1b" in shown) is live
    finally:
        os.close(ours)
        os.close(theirs)
