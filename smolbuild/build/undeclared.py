"""Inputs that a Smolfile does not declare, and what the policy ``undeclared`` makes of them.

Some are known before anything runs: host values that bare names in ``env`` import, steps in a
machine with a full network, whose traffic nobody records, and tags without a lock. Others show
while a step runs: what it asked of the network and was denied, for it is not in ``allow_hosts``.
"""

from collections.abc import Iterable, Iterator

from smolbuild.build.plan import Plan
from smolbuild.core.errors import BuildError, UsageError
from smolbuild.core.events import Emit, Message
from smolbuild.model.egress import EgressRecord
from smolbuild.model.smolfile import Notice, Policy, Smolfile

__all__ = ["denied_in", "heed_denied", "heed_known", "known_undeclared"]

_NAMED = 8


def known_undeclared(plan: Plan) -> tuple[str, ...]:
    """Return a sentence for each undeclared input that the plan shows."""
    smolfile = plan.smolfile
    found = [_imported(smolfile, notice) for notice in smolfile.notices if notice.undeclared]
    found += _unrecorded(smolfile)
    found += _unlocked(plan)
    if plan.existing is not None:
        found += denied_in(plan.existing.config.results.egress)
    return tuple(found)


def heed_known(plan: Plan, emit: Emit) -> None:
    """Warn of each undeclared input that is known before anything runs, or fail.

    Raises:
        UsageError: code ``undeclared``: there are some, and the policy is ``fail``; names them all.

    """
    found = known_undeclared(plan)
    if found and plan.smolfile.policy.undeclared == "fail":
        raise UsageError(
            "undeclared inputs: " + "; ".join(found),
            hint='declare them, or allow them with undeclared = "warn" in [smolbuild.policy]',
            code="undeclared",
        )
    for text in found:
        emit(Message(level="warning", text=f"undeclared input: {text}"))


def heed_denied(step: str, records: Iterable[EgressRecord], policy: Policy, emit: Emit) -> None:
    """Warn of what ``step`` asked of the network and was denied, or fail.

    Raises:
        BuildError: code ``undeclared``: there is some, and the policy is ``fail``.

    """
    text = _denied(step, records)
    if not text:
        return
    if policy.undeclared == "fail":
        raise BuildError(
            f"undeclared input: {text}",
            hint="add the hosts to network.allow_hosts or to the step's network, or take out what "
            "asks for them",
            code="undeclared",
        )
    emit(Message(level="warning", text=f"undeclared input: {text}"))


def denied_in(egress: Iterable[EgressRecord]) -> list[str]:
    """Return a sentence for each step of an artifact's account that was denied something."""
    by_step: dict[str, list[EgressRecord]] = {}
    for record in egress:
        by_step.setdefault(getattr(record, "step", ""), []).append(record)
    texts = (_denied(step, records) for step, records in by_step.items())
    return [text for text in texts if text]


def _denied(step: str, records: Iterable[EgressRecord]) -> str:
    targets = sorted({record.target for record in records if record.denied})
    if not targets:
        return ""
    rest = f" and {len(targets) - _NAMED} more" if len(targets) > _NAMED else ""
    who = "the services asked" if step == "services" else f"step {step} asked"
    return f"{who} for {', '.join(targets[:_NAMED])}{rest}, which it may not reach: denied"


def _imported(smolfile: Smolfile, notice: Notice) -> str:
    named = {step.key: f"step {step.name}" for step in smolfile.steps}
    named |= {service.key: f"service {service.name}" for service in smolfile.services}
    for key, name in named.items():
        if key and notice.key.startswith(f"{key}."):
            return f"{name}: {notice.text}"
    return notice.text


def _unrecorded(smolfile: Smolfile) -> Iterator[str]:
    if smolfile.network.mode != "full":
        return
    steps = [step.name for step in smolfile.steps if smolfile.network_of(step).mode == "full"]
    who = f"steps {', '.join(steps)} and the services" if steps else "the services"
    yield f"{who} have the whole network: what they fetch is not recorded"


def _unlocked(plan: Plan) -> Iterator[str]:
    if plan.lock.is_new:
        lock, smolfile = plan.lock.lock, plan.smolfile
        names = [
            *([f"image {smolfile.image}"] if lock.image and not plan.local_base else []),
            *([f"Debian {lock.debian.suite}"] if lock.debian else []),
            *([f"what {lock.dockerfile.dockerfile} is built on"] if lock.dockerfile else []),
            *(["the kernel"] if lock.kernel else []),
        ]
        if names:
            were = "was" if len(names) == 1 else "were"
            what = " and ".join(names)
            yield f"{what} {were} not locked before: commit {smolfile.path.name}.lock"
