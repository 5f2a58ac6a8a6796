"""Events as a person or a program sees them."""

import io
import json
from pathlib import Path

import jsonschema
import pytest

from smolbuild.cli import render
from smolbuild.cli.render.jsonlines import JsonLines
from smolbuild.cli.render.plain import PlainLines
from smolbuild.core.events import (
    Message,
    Output,
    PhaseFinished,
    PhaseStarted,
    StepFinished,
    StepStarted,
    Transfer,
)

FOREIGN = "\x1b]0;owned\x07"
SCHEMA = json.loads((Path(__file__).parents[4] / "schemas" / "events.v1.json").read_text())

EVERY = [
    PhaseStarted(phase="boot", text="booting"),
    PhaseFinished(phase="boot", text="booting", seconds=1.25),
    StepStarted(name="one", number=1, total=2, cached=True),
    StepStarted(name="two", number=2, total=2, cached=False),
    Output(source="two", stream="stdout", data=b"said\n"),
    Transfer(what="copy", done=1_500_000, total=3_000_000),
    Message(level="info", text="note"),
    Message(level="warning", text="beware"),
    StepFinished(name="two", seconds=61.0, status=7),
]


@pytest.mark.parametrize(
    "event",
    [
        Message(level="warning", text=f"the image's command ({FOREIGN}) has ended"),
        PhaseStarted(phase="push", text=FOREIGN),
        StepStarted(name=FOREIGN, number=1, total=1, cached=False),
        Output(source="step", stream="stdout", data=FOREIGN.encode() + b"\n"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "json", "auto"])
def test_no_event_commands_the_terminal(capsys, event, kind):
    with render.progress(kind, {}) as emit:
        emit(event)
    shown = capsys.readouterr().err
    assert "owned" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_none_says_nothing(capsys):
    with render.progress("none", {}) as emit:
        for event in EVERY:
            emit(event)
    assert capsys.readouterr().err == ""


def json_of(*events):
    stream = io.StringIO()
    lines = JsonLines(stream, now=lambda: 12.3456)
    for event in events:
        lines(event)
    lines.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_of_json_progress_is_an_event_of_the_schema():
    seen = json_of(*EVERY)
    for value in seen:
        jsonschema.validate(value, SCHEMA)
    assert [value["event"] for value in seen] == [type(event).__name__ for event in EVERY]
    assert seen[4] == {
        "event": "Output",
        "time": 12.346,
        "source": "two",
        "stream": "stdout",
        "data": "said\n",
    }
    assert {value["event"] for value in seen} == set(SCHEMA["$defs"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**seen[0], "more": 1}, SCHEMA)


def test_a_character_in_two_pieces_of_output_is_whole_in_json():
    def output(data, stream="stdout"):
        return Output(source="s", stream=stream, data=data)

    ends = "naïve".encode()
    seen = json_of(
        output(ends[:3]), output(b"!", "stderr"), output(ends[3:]), output(b"\xff"), output(b"\xe2")
    )
    texts = [value["data"] for value in seen if value["stream"] == "stdout"]
    assert "".join(texts) == "naïve\\xff\\xe2"
    assert "�" not in "".join(texts)


def plain(*events, github=False, now=lambda: 0.0):
    stream = io.StringIO()
    lines = PlainLines(stream, github=github, now=now)
    for event in events:
        lines(event)
    lines.close()
    return stream.getvalue()


def test_plain_lines_have_a_header_for_each_step():
    assert plain(*EVERY) == (
        "boot: booting\n"
        "boot: booting (1.2 s)\n"
        "step 1/2 one: cached\n"
        "step 2/2 two\n"
        "  two | said\n"
        "note\n"
        "warning: beware\n"
        "step 2/2 two: failed with status 7 (1 min 01 s)\n"
    )


def test_output_is_marked_line_by_line_and_its_last_line_needs_no_end():
    def output(data):
        return Output(source="s", stream="stdout", data=data)

    begun = StepStarted(name="s", number=1, total=1, cached=False)
    shown = plain(begun, output(b"on"), output(b"e\n10%\r20%\r"), output(b"30%\r\nlast"))
    assert shown == "step 1/1 s\n  s | one\n  s | 30%\n  s | last\n"
    bar = plain(output(b"x" * 3000 + b"\r" + b"y" * 3000), output(b"\n"))
    assert bar == f"  s | {'y' * 3000}\n"
    endless = plain(output(b"x" * 10_000))
    assert endless.replace("\n  s | ", "") == f"  s | {'x' * 10_000}\n"


def test_transfers_are_told_now_and_then():
    times = iter([0.0, 1.0, 6.0, 7.0])
    events = [Transfer(what="pull", done=n * 1_000_000, total=9_000_000) for n in range(4)]
    assert plain(*events, now=lambda: next(times)) == "  pull: 2.0 of 9.0 MB\n"


def test_github_gets_groups_and_no_command_of_a_guest():
    hostile = b"::set-env name=x::y\n##[add-matcher]x\n"
    shown = plain(
        StepStarted(name="one", number=1, total=2, cached=False),
        Output(source="one", stream="stdout", data=hostile),
        Message(level="warning", text="a\n ::stop-commands::x"),
        StepFinished(name="one", seconds=1, status=0),
        StepStarted(name="::error::\nx", number=2, total=2, cached=False),
        github=True,
    )
    assert shown.splitlines() == [
        "::group::step 1/2 one",
        "  one | ::set-env name=x::y",
        "  one | # #[add-matcher]x",
        "warning: a",
        "|  ::stop-commands::x",
        "step 1/2 one: done (1.0 s)",
        "::endgroup::",
        "::group::step 2/2 ::error:: x",
        "::endgroup::",
    ]


def test_github_is_known_by_its_variable(capsys):
    with render.progress("auto", {"GITHUB_ACTIONS": "true"}) as emit:
        emit(StepStarted(name="one", number=1, total=1, cached=False))
    assert capsys.readouterr().err == "::group::step 1/1 one\n::endgroup::\n"
