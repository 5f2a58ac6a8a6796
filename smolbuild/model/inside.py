"""What runs in a guest and where it listens, as values: seen before a checkpoint is taken."""

from smolbuild.core.values import dataclass

__all__ = ["GuestPort", "GuestProcess", "Survey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestProcess:
    """Processes that are alike; without numbers, which differ with every build."""

    name: str
    """As the kernel shows it, at most 15 bytes."""
    argv: tuple[str, ...]
    """What is not UTF-8 is replaced; long ones are cut."""
    user: str
    """A name of the guest's /etc/passwd, or the number."""
    service: str = ""
    """The service that started it; empty: nobody knows."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPort:
    """A socket that waits for others to speak first."""

    protocol: str
    """``tcp`` or ``udp``, for IPv6 too."""
    address: str
    port: int
    process: str = ""
    """The name of a process that holds it; empty: nobody does, or nobody knows."""
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Processes and ports of one moment, sorted. The agent's own are left out."""

    processes: tuple[GuestProcess, ...] = ()
    ports: tuple[GuestPort, ...] = ()
