"""The examples parse, and their data is what their generator writes."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from smolbuild.model.parse import parse_smolfile
from smolbuild.model.smolfile import HttpProbe

EXAMPLES = Path(__file__).parents[3] / "examples"
NOTES = EXAMPLES / "notes-service"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXAMPLES.glob("*/Smolfile")))
def test_an_example_parses_without_a_notice(name: str):
    assert parse_smolfile(EXAMPLES / name / "Smolfile", environment={}).notices == ()


def test_the_health_check_asks_for_as_many_notes_as_are_seeded():
    smolfile = parse_smolfile(NOTES / "Smolfile", environment={})
    assert smolfile.health is not None
    probe = smolfile.health.probe
    assert isinstance(probe, HttpProbe)
    with (NOTES / "db" / "notes.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len({row["id"] for row in rows}) == len(rows)
    assert probe.contains == f'"notes": {len(rows)}'


def test_the_seed_is_what_its_generator_writes():
    ended = subprocess.run(
        [sys.executable, str(NOTES / "db" / "make_notes.py"), "-"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == (NOTES / "db" / "notes.csv").read_bytes()


def test_the_plain_example_has_upstream_keys_only():
    assert "smolbuild]" not in (EXAMPLES / "plain-smolvm" / "Smolfile").read_text()
