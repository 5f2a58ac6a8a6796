"""A machine with the set-up done: resumed where the step cache ends, the other steps run in it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smolbuild.build.cache import CachedStep, StepCache, lineage_of
from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.keep import Keeper, StepRun
from smolbuild.build.plan import Plan
from smolbuild.build.residue import ResidueGate
from smolbuild.build.secrets import Secrets
from smolbuild.build.steps import COPY_STEP, run_steps
from smolbuild.build.undeclared import heed_denied
from smolbuild.core.errors import HostError, MachineError, SmolbuildError
from smolbuild.core.events import Message, StepStarted
from smolbuild.core.text import counted
from smolbuild.machine.base import BootSpec, Disk, Freshen, Machine, RestoreSpec
from smolbuild.model.smolfile import Step
from smolbuild.source.base_disk import BaseDisk

__all__ = ["Parts", "set_up_machine"]

_BOOT_SECONDS = 180.0
_RESTORE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The prepared inputs of a machine."""

    base: BaseDisk
    kernel: Path
    initrd: Path


def set_up_machine(
    context: BuildContext,
    plan: Plan,
    parts: Parts,
    cache: StepCache,
    secrets: Secrets,
    residue: ResidueGate,
    work: Path,
    phases: Phases,
    *,
    offer: Callable[[Machine, Step], contextlib.AbstractContextManager[None]],
) -> tuple[Machine, tuple[StepRun, ...]]:
    """Start from the longest cached prefix, run the rest; return the machine and all links.

    The machine goes on as it stood after the last cached step. Where that was not kept, or does not
    restore on this host, it boots from the disk that the step left. A step runs inside ``offer``.

    Raises:
        BuildError: a step failed.
        MachineError: the machine did not boot, or died.
        HostError: QEMU or space is missing.

    """
    found = cache.prefix(plan.chain, parts.base.digest, since=plan.oldest_delta)
    cached = cache.borrow(found, work)
    links = tuple(_reused(context, plan, cached))
    machine = _start(context, plan, parts, cached, phases)
    try:
        first = len(cached)
        to_run = counted(len(plan.chain) - max(first, 1), "step")
        with phases.phase("steps", f"{to_run} to run", when=first < len(plan.chain)):
            below = cached[-1].token if cached else lineage_of(parts.base.digest)
            keeper = Keeper(cache, plan, residue, below=below, work=work, emit=context.emit)
            links += run_steps(
                machine,
                plan.smolfile,
                plan.run,
                plan.files,
                first=first,
                keep=keeper.keep,
                secrets=secrets,
                emit=context.emit,
                authorities=plan.authorities,
                offer=lambda step: offer(machine, step),
            )
    except BaseException:
        machine.discard()
        raise
    return machine, links


def _link_name(plan: Plan, link: int) -> str:
    """Return the name of a link of the chain."""
    return COPY_STEP if link == 0 else plan.smolfile.steps[link - 1].name


def _reused(context: BuildContext, plan: Plan, cached: tuple[CachedStep, ...]) -> Iterator[StepRun]:
    for number, step in enumerate(cached):
        name = _link_name(plan, number)
        if number:
            heed_denied(name, step.egress, plan.smolfile.policy, context.emit)
            total = len(plan.chain) - 1
            context.emit(StepStarted(name=name, number=number, total=total, cached=True))
        yield StepRun(name=name, overlay=step.path, entry=step.entry, egress=step.egress)


def _start(
    context: BuildContext,
    plan: Plan,
    parts: Parts,
    cached: tuple[CachedStep, ...],
    phases: Phases,
) -> Machine:
    disk = Disk(base=parts.base.path, overlays=tuple(step.path for step in cached))
    if cached and plan.smolfile.resume == "memory":
        machine = _resume(context, plan, parts, disk, cached, phases)
        if machine is not None:
            return machine
    with phases.phase("boot", "booting"):
        return context.engine.boot(
            BootSpec(
                kernel=parts.kernel,
                initrd=parts.initrd,
                disk=disk,
                shape=plan.shape,
                zero_freed=plan.smolfile.guarded,
            ),
            timeout=_BOOT_SECONDS,
        )


def _resume(
    context: BuildContext,
    plan: Plan,
    parts: Parts,
    disk: Disk,
    cached: tuple[CachedStep, ...],
    phases: Phases,
) -> Machine | None:
    """Restore the machine as it stood after the last of ``cached``; None: it has to boot."""
    last, name = cached[-1], _link_name(plan, len(cached) - 1)
    saved = last.memory
    if saved is None or saved.shape != plan.shape or (plan.smolfile.guarded > saved.zero_freed):
        return None
    spec = RestoreSpec(
        kernel=parts.kernel,
        initrd=parts.initrd,
        disk=disk,
        shape=plan.shape,
        memory=saved.memory,
        state=saved.state,
        contract=saved.contract,
        agent_cursor=saved.agent_cursor,
    )
    with phases.phase("resume", f"resuming after {name}"):
        try:
            last.entry.touch(resumed=True)
            return _restore(context, spec)
        except (MachineError, HostError, OSError) as error:
            why = error.message if isinstance(error, SmolbuildError) else str(error.strerror)
            if isinstance(error, MachineError):  # it will not restore another time either
                last.entry.drop_memory()
            text = f"the machine kept after {name} does not restore, booting from its disk: {why}"
            context.emit(Message(level="warning", text=text))
            return None


def _restore(context: BuildContext, spec: RestoreSpec) -> Machine:
    machine = context.engine.restore(spec, own_memory=True, timeout=_RESTORE_SECONDS)
    try:
        # Right time and fresh entropy before a step runs; the names stay what they were.
        machine.freshen(Freshen())
    except BaseException:
        machine.discard()
        raise
    return machine
