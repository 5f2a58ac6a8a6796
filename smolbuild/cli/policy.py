"""What ``[smolbuild.policy]`` and the remote cache mean for a plan, for people and programs."""

import datetime as dt
import time

from smolbuild.build.plan import Plan
from smolbuild.build.undeclared import known_undeclared
from smolbuild.model.durations import spoken

__all__ = ["policy_json", "policy_lines"]


def policy_lines(plan: Plan, remote: str | None) -> list[tuple[str, str]]:
    """Return label and text of what applies; ``remote``: what the remote cache says, if asked."""
    lines = []
    if plan.age is not None:
        after = ": it is rebuilt" if plan.age.is_over else ""
        lines.append(("age", f"{plan.age}{after}"))
    elif plan.smolfile.policy.max_age is not None:
        lines.append(("age", "nothing is built yet"))
    drift = plan.drift
    if drift is not None:
        found = drift.problem or "; ".join(drift.changes) or "none"
        known = "not known: " if drift.problem else ""
        lines.append(("drift", f"{known}{found} ({_asked(drift.checked)})"))
    if remote is not None:
        lines.append(("remote", remote))
    lines += [("undeclared", text) for text in known_undeclared(plan)]
    return lines


def policy_json(plan: Plan, remote: str | None) -> dict[str, object]:
    """Return the same as members of the JSON of ``smolbuild plan``."""
    age, drift = plan.age, plan.drift
    return {
        "age": None
        if age is None
        else {
            "created": age.created,
            "seconds": round(age.seconds),
            "limit": None if age.limit is None else round(age.limit),
            "over": age.is_over,
        },
        "drift": None
        if drift is None
        else {
            "state": drift.state,
            "checked": dt.datetime.fromtimestamp(drift.checked, dt.UTC).strftime(
                "%Y-%m-%dT%H:%M:%SZ"
            ),
            "changes": list(drift.changes),
            "problem": drift.problem,
        },
        "remote": remote,
        "undeclared": list(known_undeclared(plan)),
    }


def _asked(checked: float) -> str:
    seconds = time.time() - checked
    return "asked just now" if seconds < 60 else f"asked {spoken(seconds)} ago"
