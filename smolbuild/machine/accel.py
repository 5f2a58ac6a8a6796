"""Which acceleration this host really offers: probed once per boot of the host, then remembered.

The probe itself (``machine.accel_probe``) runs a guest; what it found is a file in the cache.
"""

import json
import os
from pathlib import Path

from smolbuild.core.codec import decode, encode
from smolbuild.core.errors import VerificationError
from smolbuild.core.files import file_lock, write_atomic
from smolbuild.core.home import Home
from smolbuild.core.programs import find_program
from smolbuild.machine.acceleration import (
    ARCHITECTURE,
    MACHINE_TYPE,
    PROGRAM,
    Acceleration,
    Accelerator,
)
from smolbuild.model.contract import Contract

__all__ = ["choose_acceleration", "distrust_acceleration", "host_contract"]

_LOCK_SECONDS = 60.0


def choose_acceleration(home: Home, *, wanted: Accelerator | None = None) -> Acceleration:
    """Return the acceleration of this host, remembered or probed now (50 ms to a few seconds).

    Never hangs: a guest that does not run is killed at its deadline, and software emulation is the
    answer. Idempotent; several processes probe only once.

    Args:
        home: the answer is kept in its cache, per boot of the host and QEMU program.
        wanted: use this accelerator, without a probe of others.

    Raises:
        HostError: QEMU is missing or broken, or the host does not offer what is wanted.

    """
    program = _program_identity()
    path = home.cache / f"acceleration-{wanted or 'auto'}.json"
    remembered = _remembered(path, program)
    if remembered is not None:
        return remembered
    with file_lock(home.locks / "acceleration", timeout=_LOCK_SECONDS, what="the KVM probe"):
        remembered = _remembered(path, program)
        if remembered is not None:
            return remembered
        from smolbuild.machine.accel_probe import probe_host

        found = probe_host(program, _boot_id(), wanted)
        write_atomic(path, json.dumps(encode(found)).encode())
        return found


def host_contract(home: Home, *, wanted: Accelerator | None = None) -> Contract:
    """Return what this host offers a checkpoint now; arguments and errors as above."""
    found = choose_acceleration(home, wanted=wanted)
    return Contract(
        engine="qemu",
        engine_version=found.engine_version,
        machine_type=MACHINE_TYPE,
        cpu_model=found.cpu_model,
        accelerator=found.accelerator,
        architecture=ARCHITECTURE,
    )


def distrust_acceleration(home: Home, found: Acceleration, reason: str) -> None:
    """Remember software emulation until the next boot of the host, because ``found`` failed later.

    Idempotent.

    Raises:
        HostError: software emulation does not run either.

    """
    from smolbuild.machine.accel_probe import emulation

    emulated = emulation(found.program, _boot_id(), found.engine_version, reason)
    write_atomic(home.cache / "acceleration-auto.json", json.dumps(encode(emulated)).encode())


def _remembered(path: Path, program: str) -> Acceleration | None:
    try:
        found = decode(Acceleration, json.loads(path.read_bytes()), path.name)
    except (OSError, ValueError, VerificationError):
        return None
    return found if (found.boot_id, found.program) == (_boot_id(), program) else None


def _program_identity() -> str:
    path = os.path.realpath(find_program(PROGRAM))
    stat = os.stat(path)  # noqa: PTH116 - a plain string is what is kept
    return f"{path}:{stat.st_size}:{stat.st_mtime_ns}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # no such notion here: remembered until QEMU changes
