"""Why a build runs, as people and programs read it."""

import click

from smolbuild.build.cache import StepCache
from smolbuild.build.explain import affected_steps, changes_json, steps_to_run
from smolbuild.build.plan import Plan
from smolbuild.build.planned import PlannedStep, planned_steps
from smolbuild.core.events import Emit, Message
from smolbuild.core.text import counted, visible
from smolbuild.model.keytree import Change

__all__ = ["print_changes", "say_why", "why_json"]

_SHOWN = 40
_DETAILS = 12
_SAID = 5


def print_changes(plan: Plan, steps: tuple[PlannedStep, ...], against: str | None) -> None:
    """Print what changed, and which steps run again because of each change."""
    since = "the last build" if against is None else against
    if not plan.changes:
        if against is not None:
            click.echo(visible(f"\nnothing changed since {since}"))
        return
    click.echo(visible(f"\nchanged since {since}"))
    for change in plan.changes[:_SHOWN]:
        click.echo(visible(f"  {change}"))
        for line in change.details[:_DETAILS]:
            click.echo(visible(f"      {line}"))
        more = len(change.details) - _DETAILS
        if more > 0:
            click.echo(f"      and {counted(more, 'line')} more: --json has all")
        again = _again(change, plan, steps)
        if again:
            click.echo(visible(f"    {again}"))
    more = len(plan.changes) - _SHOWN
    if more > 0:
        click.echo(f"  and {counted(more, 'change')} more: --json has all")


def say_why(plan: Plan, emit: Emit, *, no_cache: bool) -> str:
    """Say in a few events why the build runs; return it as one line."""
    reason = _reason(plan, no_cache=no_cache)
    emit(Message(level="info", text=f"why: {reason}"))
    for change in (plan.changes or ())[:_SAID]:
        emit(Message(level="info", text=f"  {change}"))
    more = len(plan.changes or ()) - _SAID
    if more > 0:
        text = f"  and {counted(more, 'change')} more: `smolbuild plan` shows all"
        emit(Message(level="info", text=text))
    return reason


def why_json(plan: Plan, cache: StepCache, reason: str) -> dict[str, object]:
    """Return the member ``why`` of ``smolbuild build --json``; call it before the steps run."""
    return {
        "reason": reason,
        "against": plan.compared,
        "changes": changes_json(plan.changes, steps_to_run(planned_steps(plan, cache))),
    }


def _reason(plan: Plan, *, no_cache: bool) -> str:
    if no_cache:
        return "--no-cache asks for it"
    if plan.age is not None and plan.age.is_over:
        return f"the artifact is too old: {plan.age}"
    if plan.changes is None:
        return f"{plan.name} was not built before"
    if not plan.changes:
        return "something of the artifact with this key is missing"
    return f"{counted(len(plan.changes), 'change')} since the last build of {plan.name}"


def _again(change: Change, plan: Plan, steps: tuple[PlannedStep, ...]) -> str:
    names = affected_steps(change, steps_to_run(steps))
    if names:
        every = len(names) == len(steps) and len(steps) > 3
        return f"runs again: {'every step' if every else ', '.join(names)}"
    if change.first is None and steps and plan.existing is None:
        return "no step runs again: only what comes after them"
    return ""
