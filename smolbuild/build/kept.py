"""Machines that are kept as they stood when their build failed, and copy-on-write forks of them.

A kept machine is a directory: memory, device state, the whole chain of its disk, kernel and
initramfs (hard links where the file system has them), and ``kept.json``, written last. It lies in
the cache, one per artifact name, until it is dropped or the next one of the name takes its place;
or in the run directory of a build whose user is looking at it, and goes with that process.
"""

import base64
import contextlib
import datetime as dt
import json
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.codec import decode, encode
from smolbuild.core.errors import SmolbuildError, UsageError, VerificationError
from smolbuild.core.files import file_lock, private_directory, remove_tree, write_atomic
from smolbuild.core.home import Home
from smolbuild.machine.base import Disk, Engine, Freshen, Machine, RestoreSpec
from smolbuild.machine.memory import keep_file
from smolbuild.machine.network import let_through
from smolbuild.model.artifact import RunConfig
from smolbuild.model.contract import Contract, Shape
from smolbuild.model.smolfile import Network

__all__ = [
    "Failed",
    "KeptMachine",
    "KeptMachines",
    "OnFailure",
    "fork_kept",
    "keep_machine",
    "live_directory",
    "offered",
]

_FORMAT = 1
_RECORD = "kept.json"
_LIVE = "kept"
"""Name of the directory inside the run directory of the build."""
_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What a build can say of a failure while its machine still runs."""

    name: str
    """Of the artifact."""
    what: str
    """What failed: ``step two``, or ``the services``."""
    command: str
    """The step's command; empty for what is no step."""
    error: SmolbuildError
    kernel: Path
    initrd: Path
    shape: Shape
    run: RunConfig
    """Environment, working directory and user of what failed."""
    network: Network
    """What the failed part might reach."""
    within: Network
    """The machine's own network."""
    guarded: bool
    """Whether secrets passed through the machine: it may be kept only as long as its process."""


OnFailure = Callable[[Machine, Failed], None]
"""Called with the machine as it stands, before it is discarded; must not raise a SmolbuildError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMachine:
    """The record of a kept machine."""

    format_version: int
    name: str
    what: str
    command: str
    error: str
    created: str
    shape: Shape
    contract: Contract
    agent_cursor: str
    overlays: int
    run: RunConfig
    network: Network
    within: Network


@contextlib.contextmanager
def offered(
    machine: Machine, on_failure: OnFailure | None, describe: Callable[[SmolbuildError], Failed]
) -> Iterator[None]:
    """Run the block; when it fails, offer the machine before the error goes on."""
    try:
        yield
    except SmolbuildError as error:
        if on_failure is not None:
            on_failure(machine, describe(error))
        raise


def keep_machine(machine: Machine, failed: Failed, directory: Path, *, now: float) -> KeptMachine:
    """Save ``machine`` into the new directory ``directory`` and return the record written there.

    Not durable: it serves a person who is at it. An error leaves no directory.

    Raises:
        SmolbuildError: the machine cannot be saved; it is dead, for example.
        OSError: a file cannot be written.

    """
    directory.mkdir(mode=0o700)
    try:
        saved = machine.snapshot(directory)
        lower = saved.disk.overlays[:-1]
        for number, overlay in enumerate(lower):
            keep_file(overlay, directory / f"disk{number}.qcow2")
        for source, name in (
            (saved.disk.base, "base"),
            (failed.kernel, "kernel"),
            (failed.initrd, "initrd"),
        ):
            keep_file(source, directory / name)
        record = KeptMachine(
            format_version=_FORMAT,
            name=failed.name,
            what=failed.what,
            command=failed.command,
            error="" if failed.guarded else failed.error.message,
            created=dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            shape=failed.shape,
            contract=saved.contract,
            agent_cursor=base64.b64encode(saved.agent_cursor).decode(),
            overlays=len(lower),
            run=failed.run,
            network=failed.network,
            within=failed.within,
        )
        write_atomic(directory / _RECORD, json.dumps(encode(record)).encode())
    except BaseException:
        remove_tree(directory)
        raise
    return record


def fork_kept(engine: Engine, directory: Path, record: KeptMachine) -> Machine:
    """Restore a copy-on-write fork of the machine kept in ``directory``; discard it when done.

    Many may live at once, and none changes what is kept.

    Raises:
        MachineError: the host does not fit the contract any more, or the restore failed.

    """
    lower = tuple(directory / f"disk{number}.qcow2" for number in range(record.overlays))
    machine = engine.restore(
        RestoreSpec(
            kernel=directory / "kernel",
            initrd=directory / "initrd",
            disk=Disk(base=directory / "base", overlays=(*lower, directory / "disk.qcow2")),
            shape=record.shape,
            memory=directory / "memory",
            state=directory / "state",
            contract=record.contract,
            agent_cursor=base64.b64decode(record.agent_cursor),
        )
    )
    try:
        let_through(machine, record.network, within=record.within)
        machine.freshen(Freshen(hostname="debug", machine_id=secrets.token_hex(16)))
    except BaseException:
        machine.discard()
        raise
    return machine


class KeptMachines:
    """The kept machines of a home, by artifact name."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._root = private_directory(home.cache / "kept")

    def all(self) -> tuple[tuple[Path, KeptMachine], ...]:
        """Return directory and record of each, those that somebody is looking at too, by name."""
        places = (*self._root.glob("[!.]*"), *self._home.run.glob(f"*/{_LIVE}"))
        found = [(path, record) for path in places if (record := _read(path)) is not None]
        return tuple(sorted(found, key=lambda each: (each[1].name, each[1].created)))

    def find(self, name: str | None) -> tuple[Path, KeptMachine]:
        """Return the kept machine of artifact ``name``, the newest; None: the only one there is.

        Raises:
            UsageError: there is none, or several to choose from.

        """
        found = self.all()
        names = sorted({record.name for _, record in found})
        if name is None and len(names) > 1:
            raise UsageError("several machines are kept", hint=f"name one: {', '.join(names)}")
        chosen = [each for each in found if name in (None, each[1].name)]
        if not chosen:
            raise UsageError(
                f"no machine of {name} is kept" if name else "no machine is kept",
                hint=f"kept are: {', '.join(names)}"
                if names
                else "`smolbuild build --debug-on-failure` keeps one when a build fails",
                code="not-kept",
            )
        return max(chosen, key=lambda each: each[1].created)

    def keep(self, machine: Machine, failed: Failed, *, now: float) -> KeptMachine:
        """Keep ``machine``, in place of the one of the same name that was kept before.

        Raises:
            SmolbuildError, OSError: as ``keep_machine``; what was kept before stays.

        """
        with file_lock(self._home.locks / "kept", timeout=_LOCK_SECONDS, what="kept machines"):
            staging = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self._root))
            try:
                record = keep_machine(machine, failed, staging / _LIVE, now=now)
                target = self._root / failed.name.replace("/", "+")
                remove_tree(target)
                (staging / _LIVE).rename(target)
            finally:
                remove_tree(staging)
        return record

    def drop(self, name: str) -> int:
        """Drop the machine kept of artifact ``name``, and return how many there were. Idempotent.

        One that somebody is looking at stays, and goes with them.
        """
        target = self._root / name.replace("/", "+")
        with file_lock(self._home.locks / "kept", timeout=_LOCK_SECONDS, what="kept machines"):
            there = target in self._root.glob("[!.]*")  # no name leads out of the directory
            if there:
                remove_tree(target)
        return int(there)


def live_directory(run: Path) -> Path:
    """Return where a build keeps a machine for as long as its run directory ``run`` lives."""
    return run / _LIVE


def _read(directory: Path) -> KeptMachine | None:
    try:
        value = json.loads((directory / _RECORD).read_bytes())
        record = decode(KeptMachine, value, str(directory / _RECORD))
    except (OSError, ValueError, VerificationError):
        return None
    return record if record.format_version == _FORMAT else None
