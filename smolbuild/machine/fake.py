"""An engine without a hypervisor, for tests of what lies above the seam.

It passes the same contract tests as the QEMU engine. Guests are dictionaries of files; disks and
checkpoints are real (small, sparse) files in the real formats, so that packing, caching and
materialising work on them: a guest's files travel in its overlay, its raw disk and its memory.
"""

import io
import os
import secrets
import struct
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from smolbuild.core.errors import MachineError
from smolbuild.core.files import private_directory, remove_tree
from smolbuild.machine.base import (
    BootSpec,
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
    RestoreSpec,
)
from smolbuild.machine.fake_guest import MAGIC, FakeGuest, read_guest, write_guest
from smolbuild.model.inside import GuestProcess, Survey
from smolbuild.model.smolfile import ExecProbe, FileProbe, Probe

__all__ = ["FAKE_CONTRACT", "FakeEngine", "FakeMachine", "OnExec"]

OnExec = Callable[[tuple[str, ...]], tuple[int, bytes, bytes]]
"""Gives exit status, standard output and standard error of a command.

A kept execution (a service) with status 0 is alive, with another one it has ended.
"""

FAKE_CONTRACT = Contract(
    engine="fake",
    engine_version="1.0.0",
    machine_type="fake",
    cpu_model="fake",
    accelerator="none",
    architecture="x86_64",
)


class FakeEngine:
    """Boots and restores fake machines below ``directory``.

    Args:
        directory: where machines keep their files.
        on_exec: what commands do; every command succeeds silently when None.
        on_probe: whether a port or HTTP probe passes; when None, while a service is alive.
        contract: what this host offers.

    """

    def __init__(
        self,
        directory: Path,
        *,
        on_exec: OnExec | None = None,
        on_probe: Callable[[Probe], bool] | None = None,
        contract: Contract = FAKE_CONTRACT,
    ) -> None:
        self._directory = private_directory(directory)
        self._on_exec = on_exec or (lambda _: (0, b"", b""))
        self._on_probe = on_probe
        self._contract = contract
        self.machines: list[FakeMachine] = []
        """Every machine ever started, in order."""

    def contract(self) -> Contract:
        """Return the contract given at construction."""
        return self._contract

    def boot(self, spec: BootSpec, *, timeout: float = 120.0) -> "FakeMachine":
        """Boot: the files are those of the uppermost disk layer that has any."""
        del timeout
        guest = read_guest(spec.disk)
        guest.results.clear()
        guest.hostname, guest.boot_id = spec.hostname, _uuid()
        guest.machine_id = guest.machine_id or secrets.token_hex(16)
        return self._start(guest, spec, ("spawned", "greeting", "agent"))

    def restore(
        self, spec: RestoreSpec, *, own_memory: bool = False, timeout: float = 30.0
    ) -> "FakeMachine":
        """Restore from the checkpoint's memory.

        Raises:
            MachineError: code ``contract``, or the files are damaged.

        """
        del timeout
        if spec.contract != self._contract:
            raise MachineError("this host does not fit the checkpoint", code="contract")
        try:
            whole = spec.memory.stat().st_size == spec.shape.memory_mib << 20
            guest = FakeGuest.decode(spec.memory.read_bytes()) if whole else None
            intact = spec.state.read_bytes() == _state(spec.agent_cursor)
        except (ValueError, KeyError, struct.error) as error:
            raise MachineError("the checkpoint is damaged", code="damaged") from error
        if guest is None or not intact:
            raise MachineError("the checkpoint is damaged", code="damaged")
        machine = self._start(guest, spec, ("spawned", "greeting", "loaded", "running", "agent"))
        machine.shares_memory = not own_memory
        return machine

    def _start(
        self, guest: FakeGuest, spec: BootSpec | RestoreSpec, milestones: tuple[str, ...]
    ) -> "FakeMachine":
        machine = FakeMachine(
            guest,
            spec,
            directory=self._directory / secrets.token_hex(6),
            on_exec=self._on_exec,
            on_probe=self._on_probe,
            contract=self._contract,
        )
        machine.milestones = {name: float(n) for n, name in enumerate(milestones, 1)}
        self.machines.append(machine)
        return machine


class FakeMachine:
    """A guest that is a dictionary; see ``machine.base.Machine`` for the contract."""

    def __init__(
        self,
        guest: FakeGuest,
        spec: BootSpec | RestoreSpec,
        *,
        directory: Path,
        on_exec: OnExec,
        on_probe: Callable[[Probe], bool] | None,
        contract: Contract,
    ) -> None:
        self.id = directory.name
        self.accelerator = contract.accelerator
        self.milestones: dict[str, float] = {}
        self.executed: list[ExecRequest] = []
        """Every execution that was not answered from a record."""
        self.allowed: tuple[tuple[str, ...] | None, tuple[str, ...]] = (None, ())
        """What ``allow`` was last called with."""
        self.plugged = True
        """What ``plug`` was last called with."""
        self.reached: list[EgressRecord] = []
        """What ``egress_records`` returns next."""
        self.secrets: dict[str, bytes] = {}
        """What ``give_secrets`` gave and ``take_secrets`` has not yet taken."""
        self.zeroed: list[tuple[int, int]] = []
        """The ranges that ``zero_free`` was asked for."""
        self.discarded = False
        self.shares_memory = False
        """Whether it is a fork that cannot be saved."""
        self._guest = guest
        self._shape = spec.shape
        self._disk = spec.disk
        self._directory = private_directory(directory)
        self._on_exec = on_exec
        self._on_probe = on_probe
        self._contract = contract
        self._stopped = False
        self._overlays = 0
        self._lock = threading.RLock()

    def exec(self, request: ExecRequest, on_output: OnOutput | None = None) -> ExecResult:
        """Ask ``on_exec``, once for each exec id."""
        with self._lock:
            self._check()
            exec_id = request.exec_id or secrets.token_hex(16)
            if exec_id not in self._guest.results:
                self.executed.append(request)
                status, out, err = self._on_exec(request.argv)
                ended = not request.keep or status != 0
                self._guest.results[exec_id] = (status, ended, (out + err)[-65536:])
                for stream, data in (("stdout", out), ("stderr", err)):
                    if data and on_output is not None and not request.keep:
                        on_output("stdout" if stream == "stdout" else "stderr", data)
            status = self._guest.results[exec_id][0]
            return ExecResult(exec_id=exec_id, status=0 if request.keep else status)

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Check that the execution exists; nothing here looks at a size."""
        del rows, columns
        self._result(exec_id)

    def service_status(self, exec_id: str) -> ExecResult | None:
        """Return how a kept execution ended, or None while it is alive."""
        status, ended, _ = self._result(exec_id)
        return ExecResult(exec_id=exec_id, status=status) if ended else None

    def service_output(self, exec_id: str) -> bytes:
        """Return what ``on_exec`` gave for it."""
        return self._result(exec_id)[2]

    def survey(self) -> Survey:
        """Return the kept executions that are alive, as processes with their ids for arguments."""
        self._check()
        alive = (name for name, (_, ended, _) in sorted(self._guest.results.items()) if not ended)
        return Survey(
            processes=tuple(
                GuestProcess(
                    name="fake",
                    argv=(exec_id,),
                    user="root",
                    service=exec_id.removeprefix("service:"),
                )
                for exec_id in alive
            )
        )

    def end_service(self, exec_id: str, status: int) -> None:
        """Let a service end, for tests."""
        self._guest.results[exec_id] = (status, True, self._result(exec_id)[2])

    def put(self, archive: Iterable[bytes], target: str, *, timeout: float) -> None:
        """Unpack the files of a tar stream below ``target``."""
        del timeout
        self._check()
        data = io.BytesIO(b"".join(archive))
        try:
            with tarfile.open(fileobj=data, mode="r|") as tar:
                for member in tar:
                    if member.isfile() and (content := tar.extractfile(member)) is not None:
                        path = os.path.normpath(f"/{target}/{member.name}").replace("//", "/")
                        self._guest.files[path] = (member.mode, content.read())
        except tarfile.TarError as error:
            raise MachineError(f"copy into {target}: {error}") from error

    def get(self, path: str, *, timeout: float) -> Iterator[bytes]:
        """Yield a tar stream of the file, or of all files below the directory."""
        del timeout
        self._check()
        parent = os.path.dirname(path.rstrip("/")).rstrip("/")  # noqa: PTH120 - a guest path
        found = {
            name: content
            for name, content in sorted(self._guest.files.items())
            if name == path or name.startswith(path.rstrip("/") + "/")
        }
        if not found:
            raise MachineError(f"copy of {path}: No such file or directory")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name, (mode, content) in found.items():
                member = tarfile.TarInfo(name.removeprefix(parent + "/"))
                member.mode, member.size = mode, len(content)
                tar.addfile(member, io.BytesIO(content))
        yield data.getvalue()

    def probe(
        self, probe: Probe, *, timeout: float, env: tuple[tuple[str, str], ...] = ()
    ) -> ProbeResult:
        """Look at the files, ask ``on_exec``, or ask ``on_probe``."""
        self._check()
        match probe:
            case FileProbe(path=path):
                ok = path in self._guest.files
            case ExecProbe(argv=argv):
                request = ExecRequest(argv=argv, env=env, timeout=timeout)
                ok = self.exec(request).status == 0
            case _ if self._on_probe is not None:
                ok = self._on_probe(probe)
            case _:
                ok = any(not ended for _, ended, _ in self._guest.results.values())
        return ProbeResult(ok=ok, detail="as told" if ok else "not as told", seconds=0.0)

    def probe_until(self, probe: Probe, *, deadline: float, interval: float = 0.1) -> ProbeResult:
        """Make one attempt: nothing in a fake changes by waiting."""
        del interval
        return self.probe(probe, timeout=deadline)

    def allow(self, hosts: tuple[str, ...] | None, cidrs: tuple[str, ...] = ()) -> str:
        """Remember what is allowed."""
        self._check()
        self.allowed = (hosts, cidrs)
        return ""

    def plug(self, *, connected: bool) -> None:
        """Remember it."""
        self._check()
        self.plugged = connected

    def egress_records(self) -> tuple[EgressRecord, ...]:
        """Return ``reached`` and empty it."""
        taken = tuple(self.reached)
        self.reached.clear()
        return taken

    def give_secrets(self, secrets: Mapping[str, bytes | bytearray], *, user: str) -> None:
        """Put them into the guest's files; a fake has one user."""
        del user
        self.take_secrets()
        self.secrets = {name: bytes(value) for name, value in secrets.items()}
        for name, value in self.secrets.items():
            self._guest.files[f"/run/secrets/{name}"] = (0o400, value)

    def take_secrets(self) -> None:
        """Remove the files."""
        self._check()
        for name in self.secrets:
            self._guest.files.pop(f"/run/secrets/{name}", None)
        self.secrets = {}

    def zero_free(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Remember the ranges: a fake's disk holds nothing that is free."""
        self._check()
        self.zeroed.extend(ranges)

    def freshen(self, call: Freshen) -> Identity:
        """Take the new names and, when there are any, a new boot id."""
        self._check()
        self._guest.hostname = call.hostname or self._guest.hostname
        self._guest.machine_id = call.machine_id or self._guest.machine_id
        if call.hostname or call.machine_id:
            self._guest.boot_id = _uuid()
        return self.identity()

    def identity(self) -> Identity:
        """Return the names and 32 random bytes."""
        self._check()
        return Identity(
            machine_id=self._guest.machine_id,
            boot_id=self._guest.boot_id,
            random=secrets.token_bytes(32),
            clock=time.time(),
        )

    def snapshot_disk(self) -> Path:
        """Write all files into a new overlay."""
        with self._lock:
            self._check()
            path = self._directory / f"disk{self._overlays}.qcow2"
            self._overlays += 1
            write_guest(path, self._shape.disk_bytes, self._guest)
            return path

    def memory_in_use(self) -> int:
        """Return what the guest's dictionary takes."""
        return len(self._guest.encode())

    def snapshot(self, directory: Path) -> Checkpoint:
        """Write memory (sparse), state and overlay; the machine goes on."""
        with self._lock:
            self._check()
            if self.shares_memory:
                raise MachineError("a fork shares its memory with others and cannot be saved")
            cursor = secrets.token_bytes(8)
            finished = (self._directory / f"disk{n}.qcow2" for n in range(self._overlays))
            overlay = directory / "disk.qcow2"
            saved = Checkpoint(
                memory=directory / "memory",
                state=directory / "state",
                disk_overlay=overlay,
                disk=Disk(
                    base=self._disk.base, overlays=(*self._disk.overlays, *finished, overlay)
                ),
                contract=self._contract,
                agent_cursor=cursor,
            )
            with saved.memory.open("xb") as memory:
                memory.write(self._guest.encode())
                memory.truncate(self._shape.memory_mib << 20)
            saved.state.write_bytes(_state(cursor))
            saved.disk_overlay.hardlink_to(self.snapshot_disk())
            return saved

    def checkpoint(self, directory: Path) -> Checkpoint:
        """Do as ``snapshot`` does, and stop the machine."""
        with self._lock:
            saved = self.snapshot(directory)
            self._stopped = True
            return saved

    def console(self) -> str:
        """Return a line."""
        return "fake console\n"

    def discard(self) -> None:
        """Remove the directory. Idempotent; never raises."""
        self.discarded = True
        remove_tree(self._directory)

    def _result(self, exec_id: str) -> tuple[int, bool, bytes]:
        self._check()
        if exec_id not in self._guest.results:
            raise MachineError(f"the guest knows no execution {exec_id}", code="agent-unknown")
        return self._guest.results[exec_id]

    def _check(self) -> None:
        if self._stopped or self.discarded:
            raise MachineError("the machine ended", code="machine-ended", details=self.console())


def _state(cursor: bytes) -> bytes:
    return MAGIC + cursor


def _uuid() -> str:
    text = secrets.token_hex(16)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
