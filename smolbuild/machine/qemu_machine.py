"""A running QEMU machine."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.core.files import require_space
from smolbuild.machine.base import (
    Checkpoint,
    Contract,
    Disk,
    EgressRecord,
    ExecRequest,
    ExecResult,
    Freshen,
    Identity,
    OnOutput,
    ProbeResult,
    Shape,
)
from smolbuild.machine.channel import AgentChannel
from smolbuild.machine.command import overlay_node
from smolbuild.machine.cursor import Cursor
from smolbuild.machine.egress import Egress
from smolbuild.machine.launch import Process, milliseconds_since
from smolbuild.machine.memory import keep_file, save_sparse
from smolbuild.model.inside import Survey
from smolbuild.model.smolfile import Probe
from smolbuild.store.qcow2 import create_overlay

__all__ = ["QemuMachine"]

_KERNEL_SECONDS = 20.0
_QMP_SECONDS = 30.0
_SAVE_SECONDS = 300.0
_FREEZE_SECONDS = 120.0
_ENDING_SECONDS = 1.0
_FINISHING_SECONDS = 0.002
_ACCEPTED_STATES = frozenset({"completed", "failed", "cancelled"})


class QemuMachine:
    """A guest in a QEMU process of its own; see ``machine.base.Machine`` for the contract."""

    def __init__(
        self,
        *,
        process: Process,
        channel: AgentChannel,
        egress: Egress,
        contract: Contract,
        tsc_khz: int,
        shape: Shape,
        disk: Disk,
    ) -> None:
        self.id = process.directory.id
        self.accelerator = contract.accelerator
        self.milestones = {"spawned": process.spawned}
        self._process = process
        self._channel = channel
        self._egress = egress
        self._contract = contract
        self._tsc_khz = tsc_khz
        self._shape = shape
        self._disk = disk
        self._lock = threading.RLock()
        self._overlays = [process.directory.path / "disk0.qcow2"]
        self._discarded = False

    # starting

    def await_boot(self, requested: float, deadline: Deadline) -> None:
        """Wait for the agent of a booting guest.

        ``requested`` is the monotonic time that milestones count from.

        Raises:
            MachineError: it did not answer by ``deadline``, or QEMU ended.

        """
        self._process.qmp.greet(deadline=deadline)
        self.milestones["greeting"] = milliseconds_since(requested)
        seconds = min(_KERNEL_SECONDS, deadline.left())
        if self.accelerator != "tcg" and not self._process.tail.await_kernel(seconds):
            raise MachineError(
                f"no kernel started under {self.accelerator.upper()} in {seconds:.0f} s",
                hint="try again: software emulation is used until the host's next boot",
            )
        self._channel.hello(deadline.left())
        self.milestones["agent"] = milliseconds_since(requested)

    def await_restore(self, state: int, requested: float, deadline: Deadline) -> None:
        """Load the device state from the descriptor ``state``, run, and wait for the agent.

        Raises:
            MachineError: the state does not load, or something took longer than ``deadline``.

        """
        qmp, milestones = self._process.qmp, self.milestones
        qmp.greet(deadline=deadline)
        milestones["greeting"] = milliseconds_since(requested)
        # Sent at once, without waiting for each answer: QEMU runs them in this order.
        capabilities = [
            {"capability": name, "state": True} for name in ("events", "x-ignore-shared")
        ]
        sent = (
            ("migrate-set-capabilities", {"capabilities": capabilities}, None),
            ("getfd", {"fdname": "state"}, state),
            ("migrate-incoming", {"uri": "fd:state"}, None),
        )
        numbers = [
            (qmp.send(name, arguments, deadline=deadline, descriptor=descriptor), name)
            for name, arguments, descriptor in sent
        ]
        for number, name in numbers:
            qmp.result(number, name, deadline=deadline)
        self._await_migration(deadline, "load")
        milestones["loaded"] = milliseconds_since(requested)
        qmp.command("cont", deadline=deadline)
        milestones["running"] = milliseconds_since(requested)
        self._channel.ping(max(deadline.left(), 0.001))
        milestones["agent"] = milliseconds_since(requested)

    # the guest

    def exec(self, request: ExecRequest, on_output: OnOutput | None = None) -> ExecResult:
        """Run to its end (or start, with ``keep``), streaming output."""
        with self._explained(f"execution of {request.argv[0] if request.argv else 'nothing'}"):
            return self._channel.exec(request, on_output)

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Give the terminal of an execution another size; one that ended is let be."""
        with self._explained("resize"):
            self._channel.resize(exec_id, rows, columns)

    def service_status(self, exec_id: str) -> ExecResult | None:
        """Return how a kept execution ended, or None while it is alive."""
        with self._explained("service status"):
            return self._channel.service_status(exec_id)

    def service_output(self, exec_id: str) -> bytes:
        """Return the last output (at most 64 KiB) of a kept execution."""
        with self._explained("service output"):
            return self._channel.service_output(exec_id)

    def survey(self) -> Survey:
        """Return which processes run in the guest and where they listen."""
        with self._explained("survey"):
            return self._channel.survey()

    def put(self, archive: Iterable[bytes], target: str, *, timeout: float) -> None:
        """Unpack a tar stream below the guest directory ``target``."""
        with self._explained(f"copy into {target}"):
            self._channel.put(archive, target, timeout=timeout)

    def get(self, path: str, *, timeout: float) -> Iterator[bytes]:
        """Yield a tar stream of the guest path."""
        with self._explained(f"copy of {path}"):
            yield from self._channel.get(path, timeout=timeout)

    def probe(
        self, probe: Probe, *, timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> ProbeResult:
        """Make one attempt of ``probe``."""
        with self._explained("a probe"):
            return self._channel.probe(probe, timeout=timeout, env=env)

    def probe_until(self, probe: Probe, *, deadline: float, interval: float = 0.1) -> ProbeResult:
        """Repeat ``probe`` inside the agent until it passes or ``deadline`` seconds passed."""
        with self._explained("a probe"):
            return self._channel.probe_until(probe, deadline=deadline, interval=interval)

    def freshen(self, call: Freshen) -> Identity:
        """Thaw, set the clock, stir entropy, set hostname and machine-id: one call."""
        with self._explained("the fix-up"):
            return self._channel.freshen(call)

    def identity(self) -> Identity:
        """Return the machine's identity and 32 fresh random bytes."""
        with self._explained("the identity"):
            return self._channel.identity()

    # secrets

    def give_secrets(self, secrets: Mapping[str, bytes | bytearray], *, user: str) -> None:
        """Put each value into a file in the guest's memory which only ``user`` reads."""
        with self._explained("handing out secrets"):
            self._channel.give_secrets(secrets, user)

    def take_secrets(self) -> None:
        """Remove every trace of given secrets that the engine and its agent hold. Idempotent."""
        with self._explained("taking secrets away"):
            self._channel.take_secrets()

    def zero_free(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Zero what is free on the guest's disk within ``ranges``, and drop its caches."""
        with self._lock, self._explained("scrubbing the disk"):
            self._channel.sync(drop_caches=True, timeout=_FREEZE_SECONDS)
            self._channel.freeze(timeout=_FREEZE_SECONDS)
            try:
                self._channel.zero_free(ranges)
            finally:
                self._channel.thaw()

    # the network

    def allow(self, hosts: tuple[str, ...] | None, cidrs: tuple[str, ...] = ()) -> str:
        """Set what the egress lets through from now on; None: it is closed."""
        self._egress.allow(hosts, cidrs)
        with self._explained("the egress proxy"):
            if hosts is None:
                self._channel.disable_tunnels()
                self._egress.settle()
                return ""
            return self._channel.enable_tunnels()

    def plug(self, *, connected: bool) -> None:
        """Connect or cut the network device of a machine that has one."""
        if self._shape.network == "full":
            with self._explained("the network device"):
                self._process.qmp.command(
                    "set_link",
                    {"name": "net", "up": connected},
                    deadline=Deadline.after(_QMP_SECONDS),
                )

    def egress_records(self) -> tuple[EgressRecord, ...]:
        """Return what the guest asked of the network since the last call."""
        return self._egress.take_records()

    # disk and checkpoint

    def snapshot_disk(self) -> Path:
        """Sync the guest's file system and start a new overlay; return the finished one (qcow2).

        The file lies in the machine's directory: link or copy it before the machine is discarded.
        """
        with self._lock, self._explained("the disk snapshot"):
            self._channel.freeze(timeout=_FREEZE_SECONDS)
            try:
                return self._new_overlay()
            finally:
                self._channel.thaw()

    def memory_in_use(self) -> int:
        """Return the bytes of guest memory that were ever written to; 0 for a fork that shares."""
        memory = self._memory()
        return memory.stat().st_blocks * 512 if memory.exists() else 0

    def snapshot(self, directory: Path) -> Checkpoint:
        """Save the machine as it is into ``directory``; it goes on running on a new overlay.

        The files are not fsynced. Raises as ``checkpoint`` does; the machine goes on all the same,
        and when the memory did not fit it also goes on over the overlay it had.
        """
        with self._paused(directory, "the snapshot", names=False) as saved:
            try:
                save_sparse(self._memory(), saved.memory)
                # Before the state is saved: after it QEMU has given the disk up until it goes on.
                finished = self._new_overlay()
                self._save_state(saved.state)
            finally:
                self._go_on()
                # Its clock stood still meanwhile, and must not show it.
                self._channel.freshen(Freshen())
            keep_file(finished, saved.disk_overlay)
            return saved

    def checkpoint(self, directory: Path) -> Checkpoint:
        """Sync the file systems, stop the machine and save it into ``directory``.

        Raises:
            HostError: no space left.
            OSError: a file of the checkpoint exists or cannot be written.
            MachineError: it is a fork that shares its memory, the guest does not sync, or QEMU
                cannot save it.

        """
        with self._paused(directory, "the checkpoint", names=True) as saved:
            self._save_state(saved.state)
            save_sparse(self._memory(), saved.memory)
            keep_file(self._overlays[-1], saved.disk_overlay)
            return saved

    def _go_on(self) -> None:
        # QEMU says that the state is saved a moment before it lets the machine run again.
        qmp, deadline = self._process.qmp, Deadline.after(_QMP_SECONDS)
        while (
            not deadline.passed()
            and qmp.command("query-status", deadline=deadline).get("status") == "finish-migrate"
        ):
            time.sleep(_FINISHING_SECONDS)
        qmp.command("cont", deadline=deadline)

    @contextlib.contextmanager
    def _paused(self, directory: Path, doing: str, *, names: bool) -> Iterator[Checkpoint]:
        """Stop the machine at rest and give the files that it is to be saved in.

        ``names``: forks will take names of their own, a machine that goes on does not.
        """
        memory = self._memory()
        if not memory.exists():
            raise MachineError(
                "a fork shares its memory with others and cannot be saved",
                hint="boot a machine to make a checkpoint of it, or restore it with its own memory",
            )
        require_space(directory, memory.stat().st_blocks * 512, what=doing)
        with self._lock, self._explained(doing):
            # Synced, not frozen: memory and disk are saved at one instant anyway, and a frozen
            # file system costs every fork some 20 ms of thawing in a cold kernel.
            self._channel.sync(timeout=_FREEZE_SECONDS)
            cursor = Cursor(session=self._channel.quiesce(names=names), tsc_khz=self._tsc_khz)
            self._process.qmp.command("stop", deadline=Deadline.after(_QMP_SECONDS))
            overlay = directory / "disk.qcow2"
            overlays = (*self._disk.overlays, *self._overlays[:-1], overlay)
            yield Checkpoint(
                memory=directory / "memory",
                state=directory / "state",
                disk_overlay=overlay,
                disk=Disk(base=self._disk.base, overlays=overlays),
                contract=self._contract,
                agent_cursor=cursor.encode(),
            )

    def _memory(self) -> Path:
        return self._process.directory.path / "memory"

    def console(self) -> str:
        """Return the console's tail (at most 16 KiB)."""
        return self._process.tail.console()

    def discard(self) -> None:
        """Kill QEMU and remove the run directory. Idempotent; never raises."""
        # Not under the lock: what holds it waits for the engine that dies here.
        self._discarded = True
        self._process.kill_engine()
        self._channel.close()
        self._egress.close()
        self._process.kill()

    def _new_overlay(self) -> Path:
        finished = self._overlays[-1]
        number = len(self._overlays)
        path = self._process.directory.path / f"disk{number}.qcow2"
        create_overlay(path, self._shape.disk_bytes)
        deadline = Deadline.after(_QMP_SECONDS)
        node = overlay_node(f"top{number}", path, read_only=False, backing=None)
        self._process.qmp.command("blockdev-add", node, deadline=deadline)
        self._process.qmp.command(
            "blockdev-snapshot",
            {"node": f"top{number - 1}", "overlay": f"top{number}"},
            deadline=deadline,
        )
        self._overlays.append(path)
        return finished

    def _save_state(self, path: Path) -> None:
        qmp, deadline = self._process.qmp, Deadline.after(_SAVE_SECONDS)
        capabilities = [
            {"capability": name, "state": True} for name in ("events", "x-ignore-shared")
        ]
        qmp.command("migrate-set-capabilities", {"capabilities": capabilities}, deadline=deadline)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            qmp.command("getfd", {"fdname": "state"}, deadline=deadline, descriptor=descriptor)
            qmp.command("migrate", {"uri": "fd:state"}, deadline=deadline)
            self._await_migration(deadline, "save")
        finally:
            os.close(descriptor)

    def _await_migration(self, deadline: Deadline, doing: str) -> None:
        event = self._process.qmp.wait_event(
            "MIGRATION",
            deadline=deadline,
            accept=lambda data: data.get("status") in _ACCEPTED_STATES,
        )
        if event.get("status") != "completed":
            raise MachineError(f"QEMU could not {doing} the device state", code="damaged")

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        if self._discarded:
            raise MachineError(f"{doing}: the machine was discarded", code="machine-ended")
        try:
            yield
        except MachineError as error:
            if self._process.ended(within=_ENDING_SECONDS if _looks_dead(error) else 0.0):
                raise self._process.explain(f"the machine ended during {doing}", error) from error
            raise


def _looks_dead(error: MachineError) -> bool:
    return error.code in {"agent-gone", "machine-ended"}
