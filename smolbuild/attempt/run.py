"""Run a command in fresh forks of an artifact and discard them."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Literal

from smolbuild.core.errors import MachineError, SmolbuildError, UsageError
from smolbuild.machine.base import Engine, ExecRequest, Machine, RestoreSpec
from smolbuild.machine.fork import Fork, restore_fork
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.store.materialise import Materialised

__all__ = ["Attempt", "OnForkOutput", "run_forks"]

OnForkOutput = Callable[[int, Literal["stdout", "stderr"], bytes], None]
_MAX_AT_ONCE = 8
_MAX_SECONDS = 366 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One command in one fork: what it was, how long it took to be ready, how it ended."""

    number: int
    """From 1 on."""
    fork_id: str
    how: str
    milestones: dict[str, float]
    """Milliseconds since the request for this fork."""
    status: int
    """Exit status of the command; 0 when there was none to run."""
    timed_out: bool
    error: SmolbuildError | None = None
    """Why there was no healthy fork; then ``status`` is the error's exit status."""


def run_forks(
    engine: Engine,
    files: Materialised,
    config: ArtifactConfig,
    *,
    count: int,
    argv: Sequence[str],
    on_output: OnForkOutput,
    stdin: IO[bytes] | None = None,
    timeout: float = 3600.0,
    health: bool = True,
) -> tuple[Attempt, ...]:
    """Restore ``count`` forks side by side, run ``argv`` in each, and discard them all.

    Each fork fails alone: its error stands in its ``Attempt``.

    Args:
        engine: restores the forks.
        files: the materialised artifact.
        config: its config.
        count: forks to make; at most 8 exist at the same time.
        argv: the command; empty: the artifact's entrypoint and cmd, or nothing if it has none.
        on_output: receives output by fork number, from several threads.
        stdin: passed to the command of a single fork.
        timeout: seconds that the command may take.
        health: whether the health check must pass first.

    Raises:
        UsageError: ``count`` or ``timeout`` is out of range, or standard input is meant for several
            forks.

    """
    if count < 1:
        raise UsageError("the number of forks must be at least 1")
    if not 0 < timeout <= _MAX_SECONDS:  # false for NaN, too
        raise UsageError(
            f"the timeout must be above 0 and at most {_MAX_SECONDS:,} seconds, got {timeout:g}"
        )
    if stdin is not None and count > 1:
        raise UsageError("standard input can only go to one fork", hint="leave out -i or -n")
    command = tuple(argv) or config.run.entrypoint + config.run.cmd

    live = _LiveMachines(engine)

    def attempt(number: int) -> Attempt:
        try:
            fork = restore_fork(live, files, config, health=health)
        except SmolbuildError as error:
            return _failed(number, error)
        with contextlib.closing(_Discarding(fork)):
            try:
                return _run(fork, number, command, config, on_output, stdin, timeout)
            except SmolbuildError as error:
                return _failed(number, error, fork)

    if count == 1:
        return (attempt(1),)
    with ThreadPoolExecutor(min(count, _MAX_AT_ONCE), thread_name_prefix="fork") as pool:
        try:
            return tuple(pool.map(attempt, range(1, count + 1)))
        except BaseException:
            # Ctrl-C must not wait for what the forks are doing: without machines it ends now.
            pool.shutdown(wait=False, cancel_futures=True)
            live.end()
            raise


class _LiveMachines:
    """An engine that can end every machine it restored, also those still being made fresh."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._machines: list[Machine] = []
        self._ended = False
        self.contract = engine.contract
        self.boot = engine.boot

    def restore(
        self, spec: RestoreSpec, *, own_memory: bool = False, timeout: float = 30.0
    ) -> Machine:
        """Restore as the engine does, unless ``end`` was called."""
        machine = self._engine.restore(spec, own_memory=own_memory, timeout=timeout)
        with self._lock:
            if not self._ended:
                self._machines.append(machine)
                return machine
        machine.discard()
        raise MachineError("the run was interrupted", code="interrupted")

    def end(self) -> None:
        """Discard every machine, whoever uses it; none is handed out any more. Idempotent."""
        with self._lock:
            self._ended = True
            machines = tuple(self._machines)
        for machine in machines:
            machine.discard()


class _Discarding:
    def __init__(self, fork: Fork) -> None:
        self.close = fork.discard


def _run(
    fork: Fork,
    number: int,
    command: tuple[str, ...],
    config: ArtifactConfig,
    on_output: OnForkOutput,
    stdin: IO[bytes] | None,
    timeout: float,
) -> Attempt:
    status, timed_out = 0, False
    if command:
        result = fork.machine.exec(
            ExecRequest(
                argv=command,
                env=config.run.env,
                workdir=config.run.workdir,
                user=config.run.user,
                stdin=stdin if stdin is not None else b"",
                timeout=timeout,
            ),
            lambda stream, data: on_output(number, stream, data),
        )
        status, timed_out = result.status, result.timed_out
    return Attempt(
        number=number,
        fork_id=fork.id,
        how=fork.how,
        milestones=fork.milestones,
        status=status,
        timed_out=timed_out,
    )


def _failed(number: int, error: SmolbuildError, fork: Fork | None = None) -> Attempt:
    return Attempt(
        number=number,
        fork_id=fork.id if fork else "",
        how=fork.how if fork else "",
        milestones=fork.milestones if fork else {},
        status=error.exit_status,
        timed_out=False,
        error=error,
    )
