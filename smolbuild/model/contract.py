"""What a guest sees and what a host must offer: the values that tie a checkpoint to its hosts."""

from typing import Literal

from smolbuild.core.values import dataclass

__all__ = ["Contract", "Shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the guest sees: it must be the same at checkpoint and restore."""

    cpus: int
    memory_mib: int
    disk_bytes: int
    network: Literal["none", "full"] = "none"
    """``none``: no network device at all (an allow-list is served through the agent).

    ``full``: the engine's plain user networking.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a host must offer for a checkpoint to restore: values of the host that saved it."""

    engine: str
    engine_version: str
    machine_type: str
    cpu_model: str
    accelerator: str
    architecture: str
