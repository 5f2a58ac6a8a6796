"""The QEMU engine: boots and restores machines."""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.core.events import Emit, Message
from smolbuild.core.files import require_space
from smolbuild.core.home import Home
from smolbuild.machine.accel import choose_acceleration, distrust_acceleration, host_contract
from smolbuild.machine.acceleration import Acceleration, Accelerator
from smolbuild.machine.base import BootSpec, Contract, Disk, RestoreSpec, Shape
from smolbuild.machine.channel import AgentChannel
from smolbuild.machine.command import Launch
from smolbuild.machine.cursor import Cursor
from smolbuild.machine.egress import Egress
from smolbuild.machine.egress_route import Resolve, resolve_on_host
from smolbuild.machine.launch import Process, launch
from smolbuild.machine.memory import copy_sparse
from smolbuild.machine.qemu_machine import QemuMachine
from smolbuild.machine.rundir import RunDirectory
from smolbuild.store.qcow2 import create_overlay

__all__ = ["QemuEngine"]

_CLOCK_TOLERANCE = 0.01
_ALWAYS_ZEROED_MIB = 1024
_SMALL_MIB = 128
"""A machine with less may be unable to unpack its initramfs."""
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62})")


class QemuEngine:
    """Boots and restores QEMU microVMs whose files live below ``home``.

    Args:
        home: run directories and the remembered acceleration.
        emit: receives one message at a boot under software emulation.
        accelerator: use this one and nothing else; None: what a functional probe finds.
        environment: where the egress proxy of machines looks for the host's own proxy
            (``HTTPS_PROXY`` …); the process's when None.
        resolve: gives the addresses of the names that a guest may reach.

    """

    def __init__(
        self,
        home: Home,
        *,
        emit: Emit,
        accelerator: Accelerator | None = None,
        environment: Mapping[str, str] | None = None,
        resolve: Resolve = resolve_on_host,
    ) -> None:
        self._home = home
        self._emit = emit
        self._wanted = accelerator
        self._resolve = resolve
        self._environment = os.environ if environment is None else environment

    def contract(self) -> Contract:
        """Return what this host offers now (accelerator by functional probe, remembered per boot).

        Raises:
            HostError: QEMU is missing or does not run.

        """
        return host_contract(self._home, wanted=self._wanted)

    def acceleration(self) -> Acceleration:
        """Return what guests run with, and why.

        Raises:
            HostError: QEMU is missing or does not run.

        """
        return choose_acceleration(self._home, wanted=self._wanted)

    def boot(self, spec: BootSpec, *, timeout: float = 120.0) -> QemuMachine:
        """Boot and return when the agent answers.

        Raises:
            HostError: QEMU is missing, or the disk has no space for the guest's memory.
            MachineError: the guest did not come up in ``timeout``; quotes its console.

        """
        requested = time.monotonic()
        deadline = Deadline.after(timeout)
        found = self.acceleration()
        if found.accelerator == "tcg" and self._wanted is None:
            self._emit(Message(level="info", text=found.reason))
        require_space(self._home.run, spec.shape.memory_mib << 20, what="the machine's memory")
        wanted = functools.partial(
            Launch,
            kernel=spec.kernel,
            initrd=spec.initrd,
            zero_freed=spec.zero_freed or spec.shape.memory_mib <= _ALWAYS_ZEROED_MIB,
            hostname=spec.hostname if _HOSTNAME.fullmatch(spec.hostname) else "smolbuild",
        )
        with self._started(wanted, found, spec.disk, spec.shape, requested) as process:
            with _owned(self._machine(process, found, spec)) as machine:
                try:
                    machine.await_boot(requested, deadline)
                except MachineError as error:
                    self._judge_failed_boot(process, found)
                    told = process.explain("the machine did not boot", error)
                    if not told.hint and spec.shape.memory_mib < _SMALL_MIB:
                        told.hint = (
                            f"{spec.shape.memory_mib} MiB may be too little for the kernel and its "
                            "initramfs: raise `memory`"
                        )
                    raise told from error
            return machine

    def restore(
        self, spec: RestoreSpec, *, own_memory: bool = False, timeout: float = 30.0
    ) -> QemuMachine:
        """Restore a fork and return when the agent answers; it is not fresh yet: call ``freshen``.

        With ``own_memory`` it has a copy of the memory's file, and can be saved again.

        Raises:
            HostError: QEMU is missing, or the disk has no space for the copy.
            MachineError: code ``contract`` when the host does not offer ``spec.contract``; else the
                files are damaged or the guest did not answer in ``timeout``.

        """
        requested = time.monotonic()
        deadline = Deadline.after(timeout)
        found = self.acceleration()
        cursor = Cursor.decode(spec.agent_cursor)
        self._check_contract(spec.contract, cursor, found)
        _check_memory(spec.memory, spec.shape)
        wanted = functools.partial(
            Launch, restored=True, memory=None if own_memory else spec.memory
        )
        with (
            spec.state.open("rb") as state,
            self._started(
                wanted,
                found,
                spec.disk,
                spec.shape,
                requested,
                memory=spec.memory if own_memory else None,
            ) as process,
            _owned(self._machine(process, found, spec, cursor=cursor.session)) as machine,
        ):
            try:
                machine.await_restore(state.fileno(), requested, deadline)
            except MachineError as error:
                raise process.explain("the checkpoint did not restore", error) from error
            return machine

    @contextlib.contextmanager
    def _started(
        self,
        wanted: Callable[..., Launch],
        found: Acceleration,
        disk: Disk,
        shape: Shape,
        requested: float,
        *,
        memory: Path | None = None,
    ) -> Iterator[Process]:
        """Give a started QEMU; an error inside the block ends it and leaves nothing.

        With ``memory`` it begins with a copy of that file.
        """
        directory = RunDirectory.create(self._home)
        try:
            top = directory.path / "disk0.qcow2"
            create_overlay(top, shape.disk_bytes)
            if memory is not None:
                needed = memory.stat().st_blocks * 512
                require_space(self._home.run, needed, what="the machine's memory")
                copy_sparse(memory, directory.path / "memory")
            process = launch(
                wanted(
                    machine_id=directory.id,
                    shape=shape,
                    accelerator=found.accelerator,
                    cpu_model=found.cpu_model,
                    base=disk.base,
                    overlays=disk.overlays,
                    top=top,
                    tsc_khz=found.tsc_khz,
                    reserve_swap=_strict_overcommit(),
                ),
                directory,
                requested,
            )
        except BaseException:
            directory.remove()
            raise
        try:
            yield process
        except BaseException:
            process.kill()
            raise

    def _machine(
        self,
        process: Process,
        found: Acceleration,
        spec: BootSpec | RestoreSpec,
        *,
        cursor: bytes | None = None,
    ) -> QemuMachine:
        egress = Egress(environment=self._environment, resolve=self._resolve)
        return QemuMachine(
            process=process,
            channel=AgentChannel(process.agent, cursor=cursor, outside=egress),
            egress=egress,
            contract=self.contract(),
            tsc_khz=found.tsc_khz,
            shape=spec.shape,
            disk=spec.disk,
        )

    def _check_contract(self, wanted: Contract, cursor: Cursor, found: Acceleration) -> None:
        offered = self.contract()
        differences = [
            f"{name.replace('_', ' ')} {getattr(wanted, name)!r}, not {getattr(offered, name)!r}"
            for name in Contract.__dataclass_fields__
            if getattr(wanted, name) != getattr(offered, name)
        ]
        if cursor.tsc_khz and found.tsc_khz:
            # An emulated guest counts time with the host's counter: elsewhere its clock would race.
            ratio = found.tsc_khz / cursor.tsc_khz
            if abs(ratio - 1) > _CLOCK_TOLERANCE:
                differences.append(
                    f"a time stamp counter of {cursor.tsc_khz / 1000:.0f} MHz, "
                    f"not {found.tsc_khz / 1000:.0f} MHz"
                )
        if differences:
            raise MachineError(
                f"this host does not fit the checkpoint: it needs {'; '.join(differences)}",
                hint="build it here, or pull an artifact that was built on a host like this one",
                code="contract",
            )

    def _judge_failed_boot(self, process: Process, found: Acceleration) -> None:
        # The probe passed, yet no kernel line came: what the probe found is not to be trusted.
        if found.accelerator != "tcg" and self._wanted is None and not process.tail.kernel_seen:
            distrust_acceleration(
                self._home,
                found,
                f"a kernel did not start under {found.accelerator.upper()}: "
                "guests run under software emulation until the host's next boot",
            )


@contextlib.contextmanager
def _owned(machine: QemuMachine) -> Iterator[QemuMachine]:
    try:
        yield machine
    except BaseException:
        machine.discard()
        raise


def _check_memory(memory: Path, shape: Shape) -> None:
    size = memory.stat().st_size
    if size != shape.memory_mib << 20:
        raise MachineError(
            f"the checkpoint's memory {memory} has {size:,} bytes instead of "
            f"{shape.memory_mib << 20:,}",
            hint="it is damaged: pull or build the artifact again",
            code="damaged",
        )


def _strict_overcommit() -> bool:
    """Return whether the kernel insists on backing all private memory at once."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False
