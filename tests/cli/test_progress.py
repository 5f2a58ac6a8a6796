"""What a real build says on standard error."""

import json
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.vm
SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "events.v1.json").read_text())


@pytest.fixture
def failing(own_project):
    smolfile = own_project / "Smolfile"
    failing = '[[smolbuild.step]]\nname = "three"\nrun = "echo out; exit 7"\n\n'
    mark = "[[smolbuild.service]]"
    smolfile.write_text(smolfile.read_text().replace(mark, failing + mark))
    return own_project


def test_json_progress_is_events_of_the_schema(smolbuild, failing, built):
    done = smolbuild("build", "-C", str(failing), "--json", "--progress", "json")
    assert done.status == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    events = [json.loads(line) for line in lines]
    for event in events:
        jsonschema.validate(event, SCHEMA)
    times = [event["time"] for event in events]
    assert times == sorted(times)
    steps = [event for event in events if event["event"].startswith("Step")]
    assert [(e["event"], e["name"], e.get("cached"), e.get("status")) for e in steps] == [
        ("StepStarted", "one", True, None),
        ("StepStarted", "two", True, None),
        ("StepStarted", "three", False, None),
        ("StepFinished", "three", None, 7),
    ]
    said = "".join(event["data"] for event in events if event["event"] == "Output")
    assert "out\n" in said


def test_github_gets_a_group_for_each_step(smolbuild, failing, built, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = smolbuild("build", "-C", str(failing))
    lines = done.stderr.splitlines()
    begun = lines.index("::group::step 3/3 three")
    assert lines[begun + 1] == "  three | out"
    assert lines[begun + 2].startswith("step 3/3 three: failed with status 7")
    assert lines[begun + 3] == "::endgroup::"
    assert "step 1/3 one: cached" in lines


def test_a_build_says_what_took_how_long(built):
    phases = built["phases"]
    assert 0 < sum(phases.values()) <= built["seconds"] + 0.1
    assert list(phases)[:3] == ["resolve", "base", "boot"]
    assert "push" not in phases
