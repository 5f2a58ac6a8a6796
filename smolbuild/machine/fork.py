"""Restore a fork of a materialised artifact and make it fresh: the path that users time."""

import base64
import secrets
import time
from dataclasses import dataclass, field

from smolbuild.core.errors import HealthError
from smolbuild.machine.base import (
    Disk,
    Engine,
    ExecRequest,
    Freshen,
    Identity,
    Machine,
    RestoreSpec,
)
from smolbuild.machine.health import HealthReport, check_health, tail
from smolbuild.machine.network import let_through
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.store.materialise import Materialised

__all__ = ["Fork", "restore_fork"]

_HOOK_SECONDS = 60.0
_HOSTNAME = 63
"""Longest host name that is also one label in DNS."""
_HOOK_BYTES = 64 * 1024
"""The end of a hook's output that is kept for its error, however much it writes."""


@dataclass(slots=True, kw_only=True)
class Fork:
    """A fresh, healthy machine of its own. Discard it when done."""

    id: str
    machine: Machine
    identity: Identity
    how: str
    """``restored`` or ``cold``."""
    health: HealthReport | None
    milestones: dict[str, float] = field(default_factory=dict)
    """Milliseconds since the request: the engine's, then ``fresh`` and ``ready``."""

    def discard(self) -> None:
        """Kill the machine and remove its files. Idempotent."""
        self.machine.discard()


def restore_fork(
    engine: Engine,
    files: Materialised,
    config: ArtifactConfig,
    *,
    health: bool = True,
    timeout: float = 30.0,
) -> Fork:
    """Restore a copy-on-write fork, make it fresh by one agent call, check its health.

    Time starts here. The fork is handed out only when every part succeeded; a fork that could not
    be made fresh is discarded.

    Args:
        engine: restores the machine.
        files: the materialised, hence verified, artifact.
        config: its config.
        health: whether the health check must pass before the fork is handed out.
        timeout: seconds for the restore itself.

    Raises:
        MachineError: the host does not fit the contract, or the restore failed.
        HealthError: the health check or a restore hook failed.

    """
    requested = time.monotonic()
    machine = engine.restore(
        RestoreSpec(
            kernel=files.kernel,
            initrd=files.initrd,
            disk=Disk(base=files.base, overlays=(files.overlay,)),
            shape=config.shape,
            memory=files.memory,
            state=files.state,
            contract=config.contract,
            agent_cursor=base64.b64decode(config.agent_cursor),
        ),
        timeout=timeout,
    )
    try:
        return _make_fresh(machine, config, requested, health=health)
    except BaseException:
        machine.discard()
        raise


def _make_fresh(
    machine: Machine, config: ArtifactConfig, requested: float, *, health: bool
) -> Fork:
    name = config.name.rpartition("/")[2].partition(":")[0] or "smolbuild"
    fork_id = f"{name[: _HOSTNAME - 9].rstrip('-._')}-{secrets.token_hex(4)}"
    if config.network.mode == "allow":
        let_through(machine, config.network, within=config.network)
    identity = machine.freshen(
        Freshen(
            hostname=fork_id,
            machine_id=secrets.token_hex(16),
            regenerate=config.restore.regenerate,
        )
    )
    milestones = dict(machine.milestones)
    milestones["fresh"] = _since(requested)
    for number, command in enumerate(config.restore.run, 1):
        _run_hook(machine, config, number, command)
    report = None
    if health and config.health is not None:
        report = check_health(machine, config.health, config.run, config.services)
    milestones["ready"] = _since(requested)
    return Fork(
        id=fork_id,
        machine=machine,
        identity=identity,
        how="restored",
        health=report,
        milestones=milestones,
    )


def _run_hook(machine: Machine, config: ArtifactConfig, number: int, command: str) -> None:
    output = bytearray()

    def keep(_: str, data: bytes) -> None:
        output.extend(data)
        del output[:-_HOOK_BYTES]

    result = machine.exec(
        ExecRequest(
            argv=("/bin/sh", "-c", command),
            env=config.run.env,
            user="root",
            timeout=_HOOK_SECONDS,
        ),
        keep,
    )
    if result.status != 0:
        raise HealthError(
            f"restore hook {number} ({command}) ended with status {result.status}",
            hint="a fork whose hooks fail is never handed out; mend smolbuild.restore.run",
            code="restore-hook",
            details=tail(bytes(output)),
        )


def _since(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 2)
