"""Run the set-up in a booted machine: copied files first, then step by step, each cached."""

import contextlib
import dataclasses
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from smolbuild.build.authorities import Authority
from smolbuild.build.keep import StepRun
from smolbuild.build.owners import guest_owners
from smolbuild.build.secrets import Secrets
from smolbuild.build.tarstream import tar_stream
from smolbuild.build.trust_store import install_authorities
from smolbuild.build.undeclared import heed_denied
from smolbuild.core.errors import BuildError, MachineError
from smolbuild.core.events import Emit, Message, Output, StepFinished, StepStarted, Transfer
from smolbuild.machine.base import ExecRequest, Machine
from smolbuild.machine.network import let_through, proxy_env
from smolbuild.model.artifact import RunConfig
from smolbuild.model.declared import DeclaredFiles
from smolbuild.model.egress import EgressRecord
from smolbuild.model.environment import merge_env
from smolbuild.model.smolfile import Copy, Network, Smolfile, Step

__all__ = ["COPY_STEP", "Keep", "run_steps", "step_run"]

COPY_STEP = "copy"
"""Name of the delta that holds the top-level copies."""
_COPY_SECONDS = 600.0
_EVENT_BYTES = 256 * 1024
"""Copied bytes between two events."""
_KILLED = 137
_StreamName = Literal["stdout", "stderr"]
_STREAMS: tuple[_StreamName, ...] = ("stdout", "stderr")
_TAIL_LINES = 50
_TAIL_BYTES = 64 * 1024
_WANTS_NETWORK = re.compile(
    r"failure (in name resolution|resolving)|could not resolve|name or service not known"
    r"|network is unreachable|bad address '",
    re.IGNORECASE,
)
"""How resolvers, curl, apt and busybox say that there is no network."""


Keep = Callable[[Machine, int, str, tuple[EgressRecord, ...]], StepRun]
"""Keeps what the link of that number and name left, with what it asked of the network."""


def _nobody(step: Step) -> contextlib.AbstractContextManager[None]:
    del step
    return contextlib.nullcontext()


def run_steps(
    machine: Machine,
    smolfile: Smolfile,
    run: RunConfig,
    files: DeclaredFiles,
    *,
    first: int,
    keep: Keep,
    secrets: Secrets,
    emit: Emit,
    offer: Callable[[Step], contextlib.AbstractContextManager[None]] = _nobody,
    authorities: tuple[Authority, ...] = (),
) -> tuple[StepRun, ...]:
    """Apply the links ``first`` … of the chain (0: copies, n: n-th step), and ``keep`` each.

    A step runs inside ``offer`` of it, which learns of its failure while the machine is as the step
    left it.

    Raises:
        BuildError: a step failed or timed out; its name, status and last 50 lines. The steps before
            it are kept.
        MachineError: the machine died.

    """
    done = []
    total = len(smolfile.steps)
    for link in range(first, total + 1):
        started = time.monotonic()
        egress: tuple[EgressRecord, ...] = ()
        if link == 0:
            name = COPY_STEP
            _copy(machine, smolfile.copy, files, emit)
            install_authorities(machine, authorities)
        else:
            step = smolfile.steps[link - 1]
            name = step.name
            emit(StepStarted(name=name, number=link, total=total, cached=False))
            _copy(machine, step.copy, files, emit)
            with offer(step), secrets.given(machine, step):
                egress = _run_step(machine, smolfile, step, run, secrets, emit)
            heed_denied(name, egress, smolfile.policy, emit)
        done.append(keep(machine, link, name, egress))
        seconds = time.monotonic() - started
        if link:
            emit(StepFinished(name=name, seconds=seconds, status=0))
    return tuple(done)


def step_run(run: RunConfig, smolfile: Smolfile, step: Step) -> RunConfig:
    """Return how ``step`` runs in a machine whose commands otherwise run as ``run`` says."""
    return dataclasses.replace(
        run,
        env=merge_env(run.env, step.env, proxy_env(smolfile.network_of(step))),
        workdir=step.workdir or run.workdir,
        user=step.user or "root",
    )


def _copy(machine: Machine, copies: tuple[Copy, ...], files: DeclaredFiles, emit: Emit) -> None:
    if copies:
        archive = tar_stream(files, copies, owners=guest_owners(machine, copies))
        machine.put(_counted(archive, emit), "/", timeout=_COPY_SECONDS)


def _counted(archive: Iterable[bytes], emit: Emit) -> Iterator[bytes]:
    done = said = 0
    for chunk in archive:
        yield chunk
        done += len(chunk)
        if done >= said + _EVENT_BYTES:
            said = done
            emit(Transfer(what="copy", done=done, total=0))
    emit(Transfer(what="copy", done=done, total=done))


def _run_step(
    machine: Machine, smolfile: Smolfile, step: Step, run: RunConfig, secrets: Secrets, emit: Emit
) -> tuple[EgressRecord, ...]:
    """Run ``step`` and return what it asked of the network."""
    started = time.monotonic()
    last: deque[bytes] = deque()
    kept = 0

    maskers = {stream: secrets.masker() for stream in _STREAMS}

    def on_output(stream: _StreamName, data: bytes) -> None:
        show(stream, maskers[stream].feed(data))

    def show(stream: _StreamName, data: bytes) -> None:
        nonlocal kept
        if not data:
            return
        last.append(data)
        kept += len(data)
        while kept > _TAIL_BYTES and len(last) > 1:
            kept -= len(last.popleft())
        emit(Output(source=step.name, stream=stream, data=data))

    own, network = step_run(run, smolfile, step), smolfile.network_of(step)
    machine.egress_records()  # what was asked before is not this step's
    _open_network(machine, smolfile, step, emit)
    try:
        result = machine.exec(
            ExecRequest(
                argv=("/bin/sh", "-c", step.run),
                env=own.env,
                workdir=own.workdir,
                user=own.user,
                timeout=step.timeout,
                secrets=bool(step.secrets),
                offline=network.mode == "off" and smolfile.network.mode == "full",
            ),
            on_output,
        )
        for stream in _STREAMS:
            show(stream, maskers[stream].flush())
        machine.allow(None)
    except MachineError as error:
        raise MachineError(
            f"{_where(smolfile, step)}step {step.name}: {error.message}",
            hint=error.hint or "the machine ended or does not answer any more: see its console",
            code=error.code,
            details=error.details,
        ) from error
    egress = secrets.mask_records(machine.egress_records())
    if moved := sum(record.sent + record.received for record in egress):
        emit(Transfer(what="network", done=moved, total=moved))
    if result.status == 0 and not result.timed_out:
        return egress
    seconds = time.monotonic() - started
    emit(StepFinished(name=step.name, seconds=seconds, status=result.status or _KILLED))
    lines = b"".join(last).decode("utf-8", "backslashreplace").splitlines()[-_TAIL_LINES:]
    ending = (
        f"did not end within {step.timeout:g} s and was killed"
        if result.timed_out
        else f"ended with status {result.status}"
    )
    raise BuildError(
        f"{_where(smolfile, step)}step {step.name} {ending}",
        hint=_hint(egress, network, lines),
        code="step-timeout" if result.timed_out else "step-failed",
        details="\n".join(lines),
    )


def _open_network(machine: Machine, smolfile: Smolfile, step: Step, emit: Emit) -> None:
    missing = let_through(machine, smolfile.network_of(step), within=smolfile.network)
    if missing:
        text = f"step {step.name}: its network needs the proxy variables ({missing})"
        emit(Message(level="warning", text=text))


def _hint(egress: Iterable[EgressRecord], network: Network, lines: Sequence[str]) -> str:
    denied = sorted({record.target for record in egress if record.denied})
    if denied:
        return (
            f"the step asked for what it may not reach: {', '.join(denied[:5])}; if it should, add "
            "the host to network.allow_hosts or to the step's own network list"
        )
    if network.mode == "off" and any(_WANTS_NETWORK.search(line) for line in lines):
        return (
            "the network is off for this step, and its output looks as if it wanted one: set "
            "net = true, or name the hosts in network.allow_hosts; Debian packages are better "
            "listed in [smolbuild.base] packages"
        )
    return "the steps before it are cached; mend this one and build again"


def _where(smolfile: Smolfile, step: Step) -> str:
    """Return ``file:line: `` of the step's command, or nothing where the line is not known."""
    for key in (f"{step.key}.run", step.key):
        file, line = smolfile.where(key)
        if line:
            return f"{Path(file).name}:{line}: "
    return ""
