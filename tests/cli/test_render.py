"""Events as a person sees them."""

import json

import pytest

from smolbuild.cli import render
from smolbuild.core.events import Message, Output, PhaseStarted, StepStarted

FOREIGN = "\x1b]0;owned\x07"


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
    with render.progress(kind) as emit:
        emit(event)
    shown = capsys.readouterr().err
    assert "owned" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_each_line_of_json_progress_is_an_event(capsys):
    with render.progress("json") as emit:
        emit(Message(level="info", text="one\ntwo"))
        emit(Output(source="s", stream="stderr", data=b"\xff"))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["Message", "Output"]
    assert lines[1]["data"] == "\\xff"
