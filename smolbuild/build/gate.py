"""The restore proof: nothing unproven is ever named, signed or published.

The packed artifact is materialised from its packed bytes, restored in two fresh engine processes,
made fresh and health-checked; the two forks must be different machines with the right time.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from smolbuild.build.result import Proof
from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import HealthError, SmolbuildError
from smolbuild.machine.base import Engine, Identity
from smolbuild.machine.fork import Fork, restore_fork
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.store.materialise import Materialised

__all__ = ["prove_restore"]

_FORKS = 2
_CLOCK_SECONDS = 1.0
_RESTORE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One fork's identity and the host's time just before and after it was asked."""

    identity: Identity
    before: float
    after: float

    def clock_error(self) -> float:
        """Return by how many seconds the guest's clock lies outside the interval of the asking."""
        early, late = self.before - self.identity.clock, self.identity.clock - self.after
        return max(0.0, early, late)


def prove_restore(
    engine: Engine,
    files: Materialised,
    config: ArtifactConfig,
    *,
    now: Callable[[], float] = time.time,
) -> tuple[Proof, ...]:
    """Restore two forks from ``files`` at once and check them against each other and the clock.

    Two are enough to show that what must differ does; both live at the same time.

    Raises:
        HealthError: a fork did not restore, was unhealthy, had the wrong time, or resembled the
            other one; code ``restore-proof``, and the cause in the message.

    """
    with contextlib.ExitStack() as forks:
        proofs, samples = [], []
        for number, fork in enumerate(_restore_all(engine, files, config, forks), 1):
            before = now()
            identity = fork.machine.identity()
            sample = _Sample(identity=identity, before=before, after=now())
            _check_clock(sample, number)
            samples.append(sample.identity)
            proofs.append(
                Proof(
                    machine_id=identity.machine_id,
                    boot_id=identity.boot_id,
                    random_sha256=digest_bytes(identity.random),
                    ready_ms=round(fork.milestones["ready"]),
                    clock_error_ms=round(sample.clock_error() * 1000),
                )
            )
        _check_different(*samples)
        return tuple(proofs)


def _restore_all(
    engine: Engine, files: Materialised, config: ArtifactConfig, forks: contextlib.ExitStack
) -> list[Fork]:
    """Restore the forks side by side, as a worker does; whatever comes up is discarded at last."""

    def restore(number: int) -> Fork:
        fork = _restore(engine, files, config, number)
        forks.callback(fork.discard)
        return fork

    with ThreadPoolExecutor(_FORKS, thread_name_prefix="proof") as pool:
        return list(pool.map(restore, range(1, _FORKS + 1)))


def _restore(engine: Engine, files: Materialised, config: ArtifactConfig, number: int) -> Fork:
    try:
        return restore_fork(engine, files, config, timeout=_RESTORE_SECONDS)
    except SmolbuildError as error:
        raise HealthError(
            f"restore proof: fork {number} failed: {error.message}",
            hint=error.hint or "the checkpoint is not usable; nothing was signed or named",
            code="restore-proof",
            details=error.details,
        ) from error


def _check_clock(sample: _Sample, number: int) -> None:
    if sample.clock_error() > _CLOCK_SECONDS:
        raise HealthError(
            f"restore proof: the clock of fork {number} is {sample.clock_error():.3f} s off",
            code="restore-proof",
        )


def _check_different(first: Identity, second: Identity) -> None:
    for what in ("machine_id", "boot_id", "random"):
        if getattr(first, what) == getattr(second, what):
            raise HealthError(
                f"restore proof: two forks have the same {what.replace('_', ' ')}",
                hint="a fork must be a machine of its own; nothing was signed or named",
                code="restore-proof",
            )
