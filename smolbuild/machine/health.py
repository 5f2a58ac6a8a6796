"""Services, readiness and health in a running machine.

The same code serves the build, the restore proof and a worker's fork.
"""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from smolbuild.core.errors import HealthError
from smolbuild.machine.base import ExecRequest, Machine, ProbeResult
from smolbuild.model.artifact import RunConfig
from smolbuild.model.environment import merge_env
from smolbuild.model.smolfile import (
    ExecProbe,
    FileProbe,
    Health,
    HttpProbe,
    PortProbe,
    Probe,
    Service,
)

__all__ = [
    "HealthReport",
    "await_ready",
    "check_health",
    "check_still_ready",
    "describe_probe",
    "hint_for_ended",
    "start_service",
    "tail",
]

_READY_INTERVAL = 0.1
_STILL_READY_SECONDS = 10.0
_TAIL_LINES = 50
_CONSOLE_LINES = 10
"""Of the kernel's messages: whatever it says about a service that fails is among its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """A passed health check: what the probe saw, after how many attempts and seconds."""

    detail: str
    attempts: int
    seconds: float


def describe_probe(probe: Probe) -> str:
    """Return a probe in a few words, for messages."""
    match probe:
        case PortProbe():
            return f"port {probe.host}:{probe.port}"
        case HttpProbe():
            wanted = f" containing {probe.contains!r}" if probe.contains else ""
            return f"HTTP GET http://{probe.host}:{probe.port}{probe.path} ({probe.status}{wanted})"
        case FileProbe():
            return f"file {probe.path}"
        case ExecProbe():
            return f"command {' '.join(probe.argv)}"


def start_service(machine: Machine, service: Service, run: RunConfig) -> str:
    """Start ``service`` and return the exec id under which it lives.

    Raises:
        MachineError: the agent did not answer.

    """
    exec_id = f"service:{service.name}"
    machine.exec(
        ExecRequest(
            argv=("/bin/sh", "-c", service.run),
            exec_id=exec_id,
            env=merge_env(run.env, service.env),
            workdir=service.workdir or run.workdir,
            user=service.user or run.user,
            keep=True,
            timeout=30.0,
        )
    )
    return exec_id


def await_ready(machine: Machine, service: Service, run: RunConfig) -> int:
    """Wait until ``service`` passes its readiness probe; return the milliseconds it took.

    A service without a probe is ready when it is still alive after it was started.

    Raises:
        HealthError: it ended, or never became ready in ``ready_timeout``; quotes its last output.

    """
    started = time.monotonic()
    deadline = started + service.ready_timeout
    while True:
        ended = machine.service_status(f"service:{service.name}")
        if ended is not None:
            raise HealthError(
                f"service {service.name} ended with status {ended.status} before it was ready",
                hint=hint_for_ended(ended.status),
                code="service-ended",
                details=tail(machine.service_output(f"service:{service.name}")),
            )
        if service.ready is None:
            break
        left = deadline - time.monotonic()
        result = _attempt_ready(machine, service.ready, run, min(1.0, max(0.05, left)))
        if result.ok:
            break
        if time.monotonic() >= deadline:
            raise HealthError(
                f"service {service.name} was not ready within {service.ready_timeout:g} s: "
                f"{describe_probe(service.ready)}: {result.detail}",
                hint="the service's last output is above; raise ready_timeout if it is only slow",
                code="not-ready",
                details=_all_tails(machine, (service,)),
            )
    return round((time.monotonic() - started) * 1000)


def check_still_ready(machine: Machine, service: Service, run: RunConfig) -> None:
    """Probe once more whether a service that became ready still is.

    Raises:
        HealthError: it is not; quotes its last output.

    """
    if service.ready is None:
        return
    result = machine.probe(service.ready, timeout=_STILL_READY_SECONDS, env=run.env)
    if not result.ok:
        raise HealthError(
            f"service {service.name} became ready and is so no more: "
            f"{describe_probe(service.ready)}: {result.detail}",
            hint="the service's last output is above; what is saved must be a working service",
            code="not-ready",
            details=_all_tails(machine, (service,)),
        )


def check_health(
    machine: Machine,
    health: Health,
    run: RunConfig,
    services: Sequence[Service] = (),
) -> HealthReport:
    """Run the health check with upstream's semantics until it passes once.

    An attempt may take ``timeout``; ``interval`` passes between attempts; failures inside
    ``startup_grace`` do not count; ``retries`` consecutive counted failures make it unhealthy.

    Raises:
        HealthError: unhealthy; names the probe, its last output, the services' and console's tails.

    """
    started = time.monotonic()
    attempts = failures = 0
    while True:
        attempts += 1
        result = machine.probe(health.probe, timeout=health.timeout, env=run.env)
        elapsed = time.monotonic() - started
        if result.ok:
            return HealthReport(detail=result.detail, attempts=attempts, seconds=elapsed)
        if elapsed >= health.startup_grace:
            failures += 1
        if failures >= max(1, health.retries):
            raise HealthError(
                f"health check failed {failures} times in a row: "
                f"{describe_probe(health.probe)}: {result.detail}",
                hint="the services' last output is above: mend them, or what the check asks for"
                if services
                else "no service runs in this machine: mend what the steps made, or the check",
                code="unhealthy",
                details=_all_tails(machine, services),
            )
        time.sleep(health.interval)


def hint_for_ended(status: int) -> str:
    """Return what to do about a service that ended with ``status``. Pure."""
    if status == 0:
        return "a service must stay in the foreground: no & and no option that makes it a daemon"
    if status in {126, 127}:
        return "the machine has no such program, or it may not run; does the base lack a package?"
    if status == 128 + signal.SIGKILL:
        return "it was killed, as the kernel does when memory runs out: does `memory` suffice?"
    return "its last output is above; a service must stay alive, in the foreground"


def tail(data: bytes, lines: int = _TAIL_LINES) -> str:
    """Return the last ``lines`` lines of ``data`` as text; foreign bytes are shown as escapes."""
    return "\n".join(data.decode("utf-8", "backslashreplace").splitlines()[-lines:])


def _attempt_ready(machine: Machine, probe: Probe, run: RunConfig, seconds: float) -> ProbeResult:
    if isinstance(probe, ExecProbe):
        result = machine.probe(probe, timeout=max(seconds, 10.0), env=run.env)
        if not result.ok:
            time.sleep(_READY_INTERVAL)
        return result
    return machine.probe_until(probe, deadline=seconds, interval=_READY_INTERVAL)


def _all_tails(machine: Machine, services: Sequence[Service]) -> str:
    # The services last: what a person most likely needs is then nearest to the end.
    console = tail(machine.console().encode(), _CONSOLE_LINES).strip()
    parts = [f"--- console ---\n{console}"] if console else []
    for service in services:
        ended = machine.service_status(f"service:{service.name}")
        state = f"ended with status {ended.status}" if ended else "alive"
        output = tail(machine.service_output(f"service:{service.name}"))
        parts.append(f"--- service {service.name} ({state}) ---\n{output}")
    return "\n".join(parts)
