"""The end of a set-up: services started, healthy, scrubbed, probed once more, and saved."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.keep import StepRun
from smolbuild.build.plan import Plan
from smolbuild.build.scrub import scrub
from smolbuild.build.secrets import Secrets
from smolbuild.build.undeclared import heed_denied
from smolbuild.core.errors import HealthError
from smolbuild.core.events import Message
from smolbuild.core.text import counted
from smolbuild.machine.base import Checkpoint, Machine
from smolbuild.machine.health import (
    await_ready,
    check_health,
    check_still_ready,
    hint_for_ended,
    start_service,
    tail,
)
from smolbuild.machine.network import let_through, proxy_env
from smolbuild.model.artifact import Results, RunConfig
from smolbuild.model.egress import EgressRecord
from smolbuild.model.environment import merge_env
from smolbuild.model.smolfile import Service

__all__ = ["SERVICES", "Frozen", "freeze", "service_run"]

SERVICES = "services"
"""Name of the delta and of the egress that services and health check leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A saved machine: what was seen before, and the services that are alive in it."""

    checkpoint: Checkpoint
    results: Results
    egress: tuple[EgressRecord, ...]
    """Of the services and the health check."""
    services: tuple[Service, ...]
    links: tuple[StepRun, ...]
    """The links of the set-up; scrubbing adds one: what services and commands wrote until then."""


def freeze(
    context: BuildContext,
    plan: Plan,
    machine: Machine,
    links: tuple[StepRun, ...],
    secrets: Secrets,
    work: Path,
    phases: Phases,
) -> Frozen:
    """Start the services, wait for health, scrub, probe once more and save the machine.

    Raises:
        HealthError: a service or the health check failed, or died before it was saved.
        BuildError: a scrub command failed.
        MachineError: the machine died.

    """
    run = service_run(plan)
    let_through(machine, plan.smolfile.network, within=plan.smolfile.network)
    ready = {}
    starting = f"starting {counted(len(plan.services), 'service')}"
    with phases.phase("ready", starting, when=bool(plan.services)):
        for service in plan.services:
            start_service(machine, service, run)
            if not plan.implied_main:
                ready[service.name] = await_ready(machine, service, run)
    report = None
    health = plan.smolfile.health
    if health is not None:
        with phases.phase("health", "health check"):
            report = check_health(machine, health, run, plan.services)
    commands = plan.smolfile.scrub.run
    if commands is not None:
        with phases.phase("scrub", "cleaning, and zeroing what is free"):
            overlays = [link.overlay for link in links]
            finished = scrub(machine, commands, run, overlays, secrets, context.emit)
            links = (*links, StepRun(name=SERVICES, overlay=finished))
    with phases.phase("checkpoint", "checkpoint"):
        # Whoever was healthy may have died since; what is frozen must be alive (once, no retries).
        services = _probe_again(context, plan, machine, run)
        survey = machine.survey()
        checkpoint = machine.checkpoint(work)
    egress = secrets.mask_records(machine.egress_records())
    heed_denied(SERVICES, egress, plan.smolfile.policy, context.emit)
    return Frozen(
        checkpoint=checkpoint,
        results=Results(
            health=report.detail if report else "",
            ready_ms=ready,
            processes=secrets.mask_processes(survey.processes),
            ports=survey.ports,
        ),
        egress=egress,
        services=services,
        links=links,
    )


def _probe_again(
    context: BuildContext, plan: Plan, machine: Machine, run: RunConfig
) -> tuple[Service, ...]:
    """Return the services that are alive; one that ended is an error, but for an image's shell."""
    alive = []
    for service in plan.services:
        ended = machine.service_status(f"service:{service.name}")
        if ended is None:
            check_still_ready(machine, service, run)
            alive.append(service)
        elif plan.implied_main and ended.status == 0:
            # The CMD of many images is a shell, which ends at once when nobody types.
            text = f"the image's command ({service.run}) has ended: it is not in the checkpoint"
            context.emit(Message(level="info", text=text))
        else:
            raise HealthError(
                f"service {service.name} ended with status {ended.status} before the checkpoint",
                hint=hint_for_ended(ended.status),
                code="service-ended",
                details=tail(machine.service_output(f"service:{service.name}")),
            )
    health = plan.smolfile.health
    if health is not None:
        once = dataclasses.replace(health, retries=1, startup_grace=0.0)
        check_health(machine, once, run, plan.services)
    return tuple(alive)


def service_run(plan: Plan) -> RunConfig:
    """Return how services, health checks and commands of forks run."""
    env = merge_env(plan.run.env, proxy_env(plan.smolfile.network))
    return dataclasses.replace(plan.run, env=env)
