"""``[smolbuild.scrub]``: commands that clean the machine, then zeros where the disk is free."""

from collections.abc import Sequence
from pathlib import Path

from smolbuild.build.secrets import Secrets
from smolbuild.core.errors import BuildError
from smolbuild.core.events import Emit, Output
from smolbuild.machine.base import ExecRequest, Machine
from smolbuild.model.artifact import RunConfig
from smolbuild.store.qcow2 import clusters
from smolbuild.store.shadow import data_ranges_of

__all__ = ["scrub"]

_SECONDS = 600.0
_TOLD = 4000


def scrub(
    machine: Machine,
    commands: Sequence[str],
    run: RunConfig,
    overlays: Sequence[Path],
    secrets: Secrets,
    emit: Emit,
) -> Path:
    """Run ``commands`` as root, zero what is free, and return the overlay finished on the way.

    Zeroed is what any of the machine's overlays holds, so that the last one hides it; the base is
    public. Run it before the last health check: a command may restart a service.

    Args:
        machine: the running machine.
        commands: each for ``sh -c``.
        run: environment and directory.
        overlays: the machine's finished overlays.
        secrets: taken out of the commands' output.
        emit: receives it.

    Raises:
        BuildError: a command failed, code ``scrub-failed``.
        MachineError: the machine died, or its file system is none of ours.

    """
    for command in commands:
        _run(machine, command, run, secrets, emit)
    finished = machine.snapshot_disk()
    machine.zero_free(data_ranges_of([list(clusters(path)) for path in (*overlays, finished)]))
    return finished


def _run(machine: Machine, command: str, run: RunConfig, secrets: Secrets, emit: Emit) -> None:
    masker, shown = secrets.masker(), bytearray()

    def show(data: bytes) -> None:
        if data:
            shown.extend(data)
            del shown[:-_TOLD]
            emit(Output(source="scrub", stream="stdout", data=data))

    request = ExecRequest(
        argv=("/bin/sh", "-c", command), env=run.env, workdir=run.workdir, timeout=_SECONDS
    )
    result = machine.exec(request, lambda _, data: show(masker.feed(data)))
    show(masker.flush())
    if result.status != 0 or result.timed_out:
        how = "did not end in time" if result.timed_out else f"ended with status {result.status}"
        raise BuildError(
            f"[smolbuild.scrub] run: {command[:200]!r} {how}",
            code="scrub-failed",
            details=shown.decode(errors="replace"),
        )
