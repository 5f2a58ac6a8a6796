"""Why each step runs."""

from types import SimpleNamespace
from typing import Any

import pytest

from smolbuild.build.explain import affected_steps, steps_to_run
from smolbuild.build.planned import PlannedStep, planned_steps
from smolbuild.core.digest import Digest
from smolbuild.model.keytree import Change

CHAIN = tuple(Digest(f"sha256:{number:064}") for number in range(4))
BASE = Change(leaf="base", field="", old="a", new="b", text="base: newer", first=0)
TWO = Change(leaf="step b", field="run", old="a", new="b", text="step b: run", first=2)
LATE = Change(leaf="health", field="retries", old=1, new=2, text="health: retries", first=None)


def planned(changes: tuple[Change, ...] | None, cached: int, **more: Any) -> list[str]:
    """Plan three steps of whose chain ``cached`` links are there."""
    plan = SimpleNamespace(
        chain=CHAIN,
        changes=changes,
        oldest_delta=0.0,
        smolfile=SimpleNamespace(steps=[SimpleNamespace(name=name) for name in "abc"]),
        **{"existing": None, "age": None, **more},
    )
    cache = SimpleNamespace(prefix=lambda chain, since: chain[:cached])
    return [step.reason for step in planned_steps(plan, cache)]  # type: ignore[arg-type]


CACHED = "its disk is cached"


@pytest.mark.parametrize(
    ("changes", "cached", "reasons"),
    [
        (None, 0, ["not built before"] * 3),
        ((TWO, LATE), 2, [CACHED, "step b: run", "step b runs before it"]),
        ((BASE, TWO), 0, ["base: newer", "step b: run", "step a runs before it"]),
        ((BASE,), 2, [CACHED, "base: newer", "step b runs before it"]),
        ((LATE,), 2, [CACHED, "its cached disk is gone", "step b runs before it"]),
        ((LATE,), 4, [CACHED] * 3),
        ((), 0, ["its cached disk is gone", "step a runs before it", "step a runs before it"]),
    ],
)
def test_why_a_step_runs(
    changes: tuple[Change, ...] | None, cached: int, reasons: list[str]
) -> None:
    assert planned(changes, cached) == reasons


def test_many_reasons_are_few_words() -> None:
    many = tuple(Change(leaf="x", field="", old=1, new=2, text=str(n), first=0) for n in range(9))
    assert planned(many, 0)[0] == "0; 1; 2; 3; 4; 4 more"


def test_which_steps_a_change_runs_again() -> None:
    steps = [
        PlannedStep(name=name, chain_key=CHAIN[0], cached=name == "a", reason="") for name in "abc"
    ]
    again = steps_to_run(steps)
    assert affected_steps(BASE, again) == ("b", "c")
    assert affected_steps(TWO, again) == ("b", "c")
    assert affected_steps(LATE, again) == ()
