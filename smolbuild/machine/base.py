"""The engine seam: what the rest of smolbuild knows of a virtual machine.

``machine.qemu`` implements it with QEMU; ``machine.fake`` with nothing but memory, and both pass
the same contract tests. All times are in seconds, all sizes in bytes unless a name says otherwise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

from smolbuild.model.contract import Contract, Shape
from smolbuild.model.egress import EgressRecord
from smolbuild.model.inside import Survey
from smolbuild.model.smolfile import Probe

__all__ = [
    "BootSpec",
    "Checkpoint",
    "Contract",
    "Disk",
    "EgressRecord",
    "Engine",
    "ExecRequest",
    "ExecResult",
    "Freshen",
    "Identity",
    "Machine",
    "OnOutput",
    "ProbeResult",
    "RestoreSpec",
    "Shape",
    "Terminal",
]

OnOutput = Callable[[Literal["stdout", "stderr"], bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A raw base and qcow2 overlays over it, lowest first. All are opened read-only and shared.

    The engine puts a fresh copy-on-write overlay on top of them in the machine's run directory.
    """

    base: Path
    overlays: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BootSpec:
    """A cold boot."""

    kernel: Path
    initrd: Path
    disk: Disk
    shape: Shape
    hostname: str = "smolbuild"
    zero_freed: bool = False
    """Zero freed guest memory, so that a checkpoint holds no residue of it (secrets).

    Small machines always do. The guest's kernel then writes all of its memory at boot, which takes
    half a minute of emulation and as many bytes of disk for 8 GiB.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved machine's files: ``memory`` is raw guest RAM (sparse), ``state`` the device state."""

    memory: Path
    state: Path
    disk_overlay: Path
    """The machine's own top overlay at the moment of the checkpoint (qcow2, 64 KiB clusters)."""
    disk: Disk
    """All that the memory was saved over, ``disk_overlay`` last: what a restore needs.

    Overlays that the machine finished before lie in its run directory, as long as it lives.
    """
    contract: Contract
    agent_cursor: bytes
    """Opaque bytes the host needs to go on with the agent's open session in a restored machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSpec:
    """A restore: many machines may be restored from the same files at once."""

    kernel: Path
    initrd: Path
    disk: Disk
    shape: Shape
    memory: Path
    state: Path
    contract: Contract
    agent_cursor: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A terminal as the programs in it see it; 0 rows or columns: of unknown size."""

    rows: int
    columns: int
    kind: str = "xterm"
    """TERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRequest:
    """One execution in the guest.

    ``exec_id`` names one execution for ever: asking again with the same id attaches to it or
    returns its recorded result; the engine makes a fresh id when it is empty.
    """

    argv: tuple[str, ...]
    exec_id: str = ""
    env: tuple[tuple[str, str], ...] = ()
    """The complete environment besides PATH and HOME defaults."""
    workdir: str = "/"
    """Made when it is not there."""
    user: str = "root"
    """``name``, ``uid``, each with an optional ``:group``; resolved in the guest's /etc/passwd."""
    stdin: bytes | IO[bytes] = b""
    timeout: float = 60.0
    """After this the execution's whole process tree is killed."""
    keep: bool = False
    """A service: return once it is started; it lives on and its last output is kept (64 KiB)."""
    tty: Terminal | None = None
    """Run at a terminal: output is one stream, ``stdin`` are keys (Ctrl-C is a byte of it)."""
    offline: bool = False
    """Sees nothing of a full network; an allow-list is closed by ``Machine.allow`` instead."""
    secrets: bool = False
    """Gets each secret that ``Machine.give_secrets`` gave last: its value as variable NAME, and the
    path of its file as NAME_FILE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How an execution ended. ``status`` is 128+signal when a signal ended it."""

    exec_id: str
    status: int
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One attempt of a probe. ``detail`` says in a line what was seen, for errors."""

    ok: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a machine says of itself, to prove that two forks differ."""

    machine_id: str
    boot_id: str
    random: bytes
    """32 bytes of getrandom."""
    clock: float
    """The guest's wall clock in seconds since the epoch, at the moment of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshen:
    """The one fix-up call after a restore; the engine adds wall time and 64 bytes of entropy.

    Without any name the machine goes on being the one that was saved: its boot id stays too.
    """

    hostname: str = ""
    machine_id: str = ""
    """32 lower-case hex digits."""
    regenerate: tuple[str, ...] = ()


class Machine(Protocol):
    """A running guest. Every method has a deadline and raises MachineError when it passes.

    A machine whose engine process ended raises MachineError, with the console's tail as details.
    """

    id: str
    accelerator: str
    milestones: dict[str, float]
    """Milliseconds since the request: ``spawned``, ``greeting``, ``loaded``, ``running``,
    ``agent``."""

    def exec(self, request: ExecRequest, on_output: OnOutput | None = None) -> ExecResult:
        """Run to its end (or start, with ``keep``), streaming output.

        A non-zero status is no error.
        """

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Give the terminal of an execution another size; one that ended is let be."""

    def service_status(self, exec_id: str) -> ExecResult | None:
        """Return how a kept execution ended, or None while it is alive."""

    def service_output(self, exec_id: str) -> bytes:
        """Return the last output (at most 64 KiB) of a kept execution."""

    def survey(self) -> Survey:
        """Return which processes run in the guest and where they listen; the agent is left out."""

    def put(self, archive: Iterable[bytes], target: str, *, timeout: float) -> None:
        """Unpack a tar stream below the guest directory ``target`` (owners and modes kept)."""

    def get(self, path: str, *, timeout: float) -> Iterable[bytes]:
        """Yield a tar stream of the guest path."""

    def probe(
        self, probe: Probe, *, timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> ProbeResult:
        """Make one attempt of ``probe``; port, HTTP and file start no process in the guest."""

    def probe_until(self, probe: Probe, *, deadline: float, interval: float = 0.1) -> ProbeResult:
        """Repeat ``probe`` until it passes or ``deadline`` seconds passed; return the last result.

        Port, HTTP and file probes are repeated inside the agent.
        """

    def allow(self, hosts: tuple[str, ...] | None, cidrs: tuple[str, ...] = ()) -> str:
        """Set what the egress of a ``none`` machine lets through now; None: it is closed.

        Open with an empty list it denies and records everything. Returns what keeps it from holding
        for programs that know of no proxy; empty: nothing does.
        """

    def plug(self, *, connected: bool) -> None:
        """Connect or cut the device of a ``full`` machine, where the guest cannot undo it."""

    def egress_records(self) -> tuple[EgressRecord, ...]:
        """Return what the guest asked of the network since the last call, denied requests too.

        Complete for a step once its network was closed by ``allow(None)``.
        """

    def give_secrets(self, secrets: Mapping[str, bytes | bytearray], *, user: str) -> None:
        """Put each value into a file in memory, ``/run/secrets/NAME``, which only ``user`` reads.

        Values that were given before are taken away.
        """

    def take_secrets(self) -> None:
        """Remove every trace of given secrets that the engine and its agent hold. Idempotent."""

    def zero_free(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Zero what is free on the guest's disk within ``(offset, length)`` ranges, in bytes.

        Also forgets what the guest caches of its files.
        """

    def freshen(self, call: Freshen) -> Identity:
        """Thaw, set the clock, reseed, set the hostname and machine-id given: one call."""

    def identity(self) -> Identity:
        """Return the machine's identity and 32 fresh random bytes."""

    def snapshot_disk(self) -> Path:
        """Sync the guest's file system and start a new overlay; return the finished one (qcow2).

        The file lies in the run directory: link or copy it before the machine is discarded.
        """

    def memory_in_use(self) -> int:
        """Return the bytes of guest memory that were ever written to: what a save may take."""

    def snapshot(self, directory: Path) -> Checkpoint:
        """Save the machine as it is into ``directory``, an empty one; it goes on running.

        From then on it writes to a new overlay, as after ``snapshot_disk``, and the finished one is
        ``Checkpoint.disk_overlay``. The files are complete, not fsynced. It is paused meanwhile,
        and its clock is right again afterwards. Whatever fails, the machine goes on; when there is
        no space for the memory (HostError), over the overlay that it had.
        """

    def checkpoint(self, directory: Path) -> Checkpoint:
        """Sync the file systems, stop the machine and save it into ``directory``.

        The machine stays stopped; discard it afterwards. The files are complete, not fsynced.
        """

    def console(self) -> str:
        """Return the console's tail (at most 16 KiB)."""

    def discard(self) -> None:
        """Kill the engine process and remove the run directory. Idempotent; never raises."""


class Engine(Protocol):
    """Boots and restores machines."""

    def contract(self) -> Contract:
        """Return what this host offers (accelerator by functional probe, remembered per boot)."""

    def boot(self, spec: BootSpec, *, timeout: float = 120.0) -> Machine:
        """Boot and return when the agent answers."""

    def restore(
        self, spec: RestoreSpec, *, own_memory: bool = False, timeout: float = 30.0
    ) -> Machine:
        """Restore a fork and return when the agent answers; it is not fresh yet: call ``freshen``.

        Forks share the memory's file copy-on-write, and cannot be saved again. With ``own_memory``
        the machine has a copy of it, and can be saved like one that booted.

        Raises:
            MachineError: code ``contract`` when the host does not offer ``spec.contract``.

        """
