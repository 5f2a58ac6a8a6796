"""What guests run with on this host: the values that ``machine.accel`` finds and remembers."""

from typing import Literal

from smolbuild.core.values import dataclass

__all__ = ["ARCHITECTURE", "MACHINE_TYPE", "PROGRAM", "Acceleration", "Accelerator"]

PROGRAM = "qemu-system-x86_64"

MACHINE_TYPE = "microvm"
"""Unversioned by QEMU; its version is part of the contract."""

ARCHITECTURE = "x86_64"

Accelerator = Literal["kvm", "hvf", "tcg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """What guests run with on this host, since its last boot, with this QEMU."""

    accelerator: Accelerator
    cpu_model: str
    """Value of QEMU's ``-cpu``."""
    engine_version: str
    tsc_khz: int
    """Frequency of the guest's time stamp counter under software emulation; 0 with acceleration."""
    reason: str
    """Why this accelerator, in a line for the user."""
    boot_id: str
    program: str
    """Path, size and time of the QEMU program that was asked."""
