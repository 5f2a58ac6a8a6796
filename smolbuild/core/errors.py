"""The one error tree of smolbuild.

Every error a user can meet is one of these classes, and nothing else reaches the command line::

    SmolbuildError            exit 1   something failed
    ├── UsageError            exit 2   the command or its arguments are wrong
    │   └── SmolfileError     exit 2   the Smolfile is wrong; carries every problem of the file
    ├── HostError             exit 1   the host lacks a tool, a kernel, space or a permission
    ├── BuildError            exit 1   a step failed, timed out, or an input could not be prepared
    ├── MachineError          exit 1   the virtual machine or its agent misbehaved
    ├── HealthError           exit 3   unfit to be published: never ready, unhealthy, no restore,
    │                                  or a secret is left in it
    ├── VerificationError     exit 4   a digest, signature, subject or policy check failed
    ├── RegistryError         exit 5   the registry or the network failed; trying again may help
    ├── OutcomeUnknownError   exit 6   an effect may or may not have happened; reconcile first
    └── BusyError             exit 75  somebody else holds what is needed; trying again helps

An error has a stable ``code`` for programs, a ``message`` that says what and where, and a ``hint``
that says what to do.
"""

from typing import ClassVar

from smolbuild.core.values import dataclass

__all__ = [
    "BuildError",
    "BusyError",
    "HealthError",
    "HostError",
    "MachineError",
    "OutcomeUnknownError",
    "Problem",
    "RegistryError",
    "SmolbuildError",
    "SmolfileError",
    "UsageError",
    "VerificationError",
]


class SmolbuildError(Exception):
    """Base of all errors shown to users.

    Args:
        message: what failed and where, one or a few lines, without a trailing full stop needed.
        hint: what the user can do about it; empty when there is nothing to add.
        code: stable machine-readable code in ``kebab-case``; the class's default when omitted.
        details: further lines to show below the message (the tail of an output, for example).

    """

    default_code: ClassVar[str] = "failed"
    exit_status: ClassVar[int] = 1

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, details: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.details = details


class UsageError(SmolbuildError):
    """The command line or a file the user named is wrong (exit 2)."""

    default_code = "usage"
    exit_status = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem in a Smolfile: where it is, what was expected, what to do."""

    file: str
    line: int
    """1-based; 0 when the problem has no line of its own (a missing key, for example)."""
    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        """Render as ``file:line: key: message (hint)``."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        key = f" {self.key}:" if self.key else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}:{key} {self.message}{hint}"


class SmolfileError(UsageError):
    """A Smolfile does not parse; carries all problems of the file at once (exit 2)."""

    default_code = "smolfile"

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class HostError(SmolbuildError):
    """The host lacks something: a program, a kernel, disk space, a permission (exit 1)."""

    default_code = "host"


class BuildError(SmolbuildError):
    """A build step or the preparation of an input failed (exit 1)."""

    default_code = "build"


class MachineError(SmolbuildError):
    """The machine, its hypervisor or its agent failed or did not answer in time (exit 1)."""

    default_code = "machine"


class HealthError(SmolbuildError):
    """A readiness probe, health check, residue scan or the restore proof failed (exit 3)."""

    default_code = "health"
    exit_status = 3


class VerificationError(SmolbuildError):
    """A digest, length, signature, subject or policy check failed; nothing was opened (exit 4)."""

    default_code = "verification"
    exit_status = 4


class RegistryError(SmolbuildError):
    """A registry or the network failed after bounded retries; local data is intact (exit 5)."""

    default_code = "registry"
    exit_status = 5


class OutcomeUnknownError(SmolbuildError):
    """An effect may or may not have happened; look before trying again (exit 6)."""

    default_code = "outcome-unknown"
    exit_status = 6


class BusyError(SmolbuildError):
    """Somebody else holds a lock or resource past the deadline (exit 75)."""

    default_code = "busy"
    exit_status = 75
