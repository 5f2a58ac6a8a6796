"""Which steps a plan would run, and why each of them."""

from smolbuild.build.cache import StepCache
from smolbuild.build.plan import Plan
from smolbuild.core.digest import Digest
from smolbuild.core.values import dataclass

__all__ = ["PlannedStep", "planned_steps"]

_REASONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """Whether a step would run, and why."""

    name: str
    chain_key: Digest
    cached: bool
    reason: str


def planned_steps(plan: Plan, cache: StepCache) -> tuple[PlannedStep, ...]:
    """Return each step with whether it would run, and why."""
    cached = 0
    if plan.existing is None:  # else nobody asks the cache
        cached = len(cache.prefix(plan.chain, since=plan.oldest_delta))
    steps = []
    for link, step in enumerate(plan.smolfile.steps, 1):
        is_cached = plan.existing is not None or link < cached
        if plan.existing is not None:
            reason = "the whole artifact is there"
        elif is_cached:
            reason = "its disk is cached"
        elif plan.age is not None and plan.age.is_over and not plan.changes:
            reason = f"the artifact is too old: {plan.age}"
        else:
            reason = _why(plan, link, cached)
        steps.append(
            PlannedStep(name=step.name, chain_key=plan.chain[link], cached=is_cached, reason=reason)
        )
    return tuple(steps)


def _why(plan: Plan, link: int, first: int) -> str:
    """Say why the step at ``link`` runs; ``first`` is the lowest link that is not cached."""
    if plan.changes is None:
        return "not built before"
    reaching = [c for c in plan.changes if c.first is not None and c.first <= link]
    lowest = max(first, 1)
    if link == lowest:
        said = [change.text for change in reaching]
    else:
        said = [change.text for change in reaching if change.first == link]
        said = said or [f"step {plan.smolfile.steps[lowest - 1].name} runs before it"]
    if len(said) > _REASONS:
        said[_REASONS:] = [f"{len(said) - _REASONS} more"]
    return "; ".join(said) or "its cached disk is gone"
