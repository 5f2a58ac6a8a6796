"""Secrets of a build: read on the host when a step needs them, wiped when the build ends."""

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from smolbuild.build.mask import Masker, mask_text
from smolbuild.core.errors import HostError, MachineError, SmolbuildError, UsageError
from smolbuild.core.events import Emit, Event, Message
from smolbuild.core.process import Completed, run
from smolbuild.machine.base import Machine
from smolbuild.model.egress import EgressRecord
from smolbuild.model.inside import GuestProcess
from smolbuild.model.smolfile import SecretSource, Smolfile, Step
from smolbuild.residue.forms import MIN_SECRET, forms_of

__all__ = ["MAX_SECRET", "Secret", "Secrets"]

MAX_SECRET = 64 * 1024
"""Bytes of one value."""
_MAX_TOGETHER = 192 * 1024
"""Bytes of all values that one step gets: they travel in one request."""
_COMMAND_SECONDS = 30.0
_FEW = 4
_TOLD = 500
_MAX_ARGUMENT = 512
"""Characters of an argument of a process, as they are kept."""

RunCommand = Callable[[Sequence[str], Path], Completed]
"""Runs an argument list in a directory, with a deadline."""


class Secret:
    """A secret's value, in the one buffer that can be wiped. Neither ``repr`` nor ``str`` tells it.

    ``name`` is what the Smolfile calls it.
    """

    __slots__ = ("_value", "name")

    def __init__(self, name: str, value: bytearray) -> None:
        self.name = name
        self._value = value

    def __repr__(self) -> str:
        return f"Secret({self.name!r}, ***)"

    @property
    def value(self) -> bytearray:
        """The bytes themselves: never to be shown, logged or stored."""
        return self._value

    def wipe(self) -> None:
        """Overwrite the value. Idempotent."""
        self._value[:] = bytes(len(self._value))
        self._value.clear()


class Secrets:
    """The secrets that a Smolfile names; each is read when it is first asked for, and only once.

    Leaving the ``with`` block wipes them.

    Args:
        sources: where each is found, by name.
        environment: the host's variables.
        directory: what relative paths and commands refer to.
        run_command: runs ``from_command``; for tests.

    """

    def __init__(
        self,
        sources: Mapping[str, SecretSource],
        *,
        environment: Mapping[str, str],
        directory: Path,
        run_command: RunCommand | None = None,
    ) -> None:
        self._sources = sources
        self._environment = environment
        self._directory = directory
        self._run = run_command or _run_on_host
        self._read: dict[str, Secret] = {}
        self._unreadable: set[str] = set()
        self._needles: tuple[bytes, ...] | None = ()

    @classmethod
    def of_smolfile(cls, smolfile: Smolfile, environment: Mapping[str, str]) -> Self:
        """Return the secrets of ``smolfile``; nothing is read yet."""
        return cls(smolfile.secrets, environment=environment, directory=smolfile.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for secret in self._read.values():
            secret.wipe()
        self._read.clear()
        self._needles = ()

    def of(self, names: Sequence[str]) -> tuple[Secret, ...]:
        """Return the secrets called ``names``.

        Raises:
            UsageError: one is missing, cannot be read, or its value is empty, too short, too plain
                or too large; names the secret and where it was looked for, never its value.

        """
        for name in names:
            if name not in self._read:
                self._read[name] = self._obtain(name)
                self._needles = None
        return tuple(self._read[name] for name in dict.fromkeys(names))

    def readable(self) -> tuple[Secret, ...]:
        """Return every secret of the Smolfile that can be read: what no step asked for, too.

        What could not be read is not tried again: its command may take its whole deadline.
        """
        for name in self._sources:
            if name in self._unreadable:
                continue
            try:
                self.of((name,))
            except UsageError:
                self._unreadable.add(name)
        return self.known()

    def known(self) -> tuple[Secret, ...]:
        """Return the secrets that were read so far."""
        return tuple(self._read.values())

    @contextlib.contextmanager
    def given(self, machine: Machine, step: Step) -> Iterator[None]:
        """Have the secrets of ``step`` in the guest while the block runs, and not a moment longer.

        Raises:
            UsageError: as ``of``.
            MachineError: they cannot be handed out or taken back.

        """
        if not step.secrets:
            yield
            return
        secrets = self.of(step.secrets)
        together = sum(len(secret.value) for secret in secrets)
        if together > _MAX_TOGETHER:
            raise UsageError(
                f"step {step.name} asks for secrets of {together:,} bytes, more than the "
                f"{_MAX_TOGETHER:,} that one step can get",
                hint="ask for them in several steps",
                code="secret",
            )
        try:
            machine.give_secrets(
                {secret.name: secret.value for secret in secrets}, user=step.user or "root"
            )
            yield
        except BaseException:
            with contextlib.suppress(MachineError):  # the machine is given up in any case
                machine.take_secrets()
            raise
        machine.take_secrets()

    def masker(self) -> Masker:
        """Return what masks one stream: every form of every secret that was read by now."""
        return Masker(self._forms())

    def mask(self, text: str) -> str:
        """Return ``text`` without secrets."""
        return mask_text(text, self._forms()) if self._read else text

    def mask_records(self, records: Sequence[EgressRecord]) -> tuple[EgressRecord, ...]:
        """Return what was asked of the network without secrets in names and URLs."""
        if not self._read:
            return tuple(records)
        return tuple(
            dataclasses.replace(record, host=self.mask(record.host), url=self.mask(record.url))
            for record in records
        )

    def mask_processes(self, processes: Sequence[GuestProcess]) -> tuple[GuestProcess, ...]:
        """Return processes without secrets in their arguments, of secrets that no step read, too.

        Long arguments are cut, afterwards: half a secret could not be found.
        """
        self.readable()
        return tuple(
            dataclasses.replace(
                process,
                name=self.mask(process.name),
                argv=tuple(self.mask(argument)[:_MAX_ARGUMENT] for argument in process.argv),
            )
            for process in processes
        )

    @contextlib.contextmanager
    def masked_errors(self) -> Iterator[None]:
        """Take secrets out of the errors that leave the block."""
        try:
            yield
        except SmolbuildError as error:
            error.message = self.mask(error.message)
            error.hint = self.mask(error.hint)
            error.details = self.mask(error.details)
            error.args = (error.message,)
            raise

    def masked(self, emit: Emit) -> Emit:
        """Return an ``Emit`` that takes secrets out of messages; output is masked as a stream."""

        def masking(event: Event) -> None:
            if isinstance(event, Message):
                event = Message(level=event.level, text=self.mask(event.text))
            emit(event)

        return masking

    def _forms(self) -> tuple[bytes, ...]:
        if self._needles is None:
            self._needles = tuple(
                form.data for secret in self._read.values() for form in forms_of(secret.value)
            )
        return self._needles

    def _obtain(self, name: str) -> Secret:
        source = self._sources.get(name, SecretSource(from_env=name))
        value = self._value(name, source)
        core = bytes(value).strip()
        problem = ""
        if not core:
            problem = "is empty"
        elif len(value) > MAX_SECRET:
            problem = f"has more than {MAX_SECRET:,} bytes"
        elif len(core) < MIN_SECRET or len(set(core)) < _FEW:
            problem = (
                f"has fewer than {MIN_SECRET} bytes, or hardly any different ones: it could not "
                "be told from chance when the result is searched for it"
            )
        if problem:
            value[:] = bytes(len(value))
            raise _refusal(name, source, problem)
        return Secret(name, value)

    def _value(self, name: str, source: SecretSource) -> bytearray:
        if source.from_env is not None:
            text = self._environment.get(source.from_env)
            if text is None:
                raise _refusal(name, source, "is not set")
            return bytearray(os.fsencode(text))
        if source.from_file is not None:
            try:
                return _read_file(self._directory / Path(source.from_file).expanduser())
            except (OSError, RuntimeError) as error:
                why = getattr(error, "strerror", None) or str(error)
                raise _refusal(name, source, f"cannot be read: {why}") from error
        return self._ask(name, source)

    def _ask(self, name: str, source: SecretSource) -> bytearray:
        try:
            done = self._run(source.from_command or (), self._directory)
        except HostError as error:
            raise _refusal(name, source, f"cannot be had: {error.message}") from error
        value = bytearray(done.stdout.removesuffix(b"\n"))
        if done.status != 0:
            told = done.stderr.decode(errors="replace").strip()[-_TOLD:]
            if len(value) >= MIN_SECRET:
                told = mask_text(told, (bytes(value),))
            raise _refusal(name, source, f"ended with status {done.status}", told)
        return value


def _run_on_host(argv: Sequence[str], directory: Path) -> Completed:
    return run(argv, timeout=_COMMAND_SECONDS, cwd=directory)


def _read_file(path: Path) -> bytearray:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file")
        value = bytearray()
        while len(value) <= MAX_SECRET and (part := os.read(descriptor, MAX_SECRET + 1)):
            value += part
        return value
    finally:
        os.close(descriptor)


def _refusal(name: str, source: SecretSource, problem: str, details: str = "") -> UsageError:
    if source.from_command is not None:
        where = f"the command {source.from_command[0]}"
    elif source.from_file is not None:
        where = f"the file {source.from_file}"
    else:
        where = f"the variable {source.from_env}"
    return UsageError(
        f"the secret {name}: {where} {problem}",
        hint=f"[secrets] or [smolbuild.secrets] says where {name} is found",
        code="secret",
        details=details,
    )
