"""The entry point: commands loaded on demand, errors turned into exit statuses."""

import atexit
import contextlib
import errno
import importlib
import json
import keyword
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import click

from smolbuild import __version__
from smolbuild.core.errors import HostError, SmolbuildError, SmolfileError, UsageError
from smolbuild.core.text import visible

__all__ = ["complain", "main", "report", "run", "show_error"]

_COMMANDS = {
    "init": ("smolbuild.cli.init", "Look at a directory and write a first Smolfile for it."),
    "import": ("smolbuild.cli.init", "Make a Smolfile of a devcontainer.json or a Dockerfile."),
    "build": ("smolbuild.cli.build", "Build, prove and sign the artifact of a Smolfile."),
    "plan": ("smolbuild.cli.plan", "Show the provenance key, every input, and what would run."),
    "lock": ("smolbuild.cli.plan", "Pin base image, packages and kernel in Smolfile.lock."),
    "run": ("smolbuild.cli.run", "Restore forks of an artifact and run a command in each."),
    "debug": ("smolbuild.cli.debug", "Look into the machine of a build that failed."),
    "push": ("smolbuild.cli.registry", "Publish an artifact to an OCI registry."),
    "pull": ("smolbuild.cli.registry", "Fetch an artifact, verify it, and materialise it."),
    "verify": ("smolbuild.cli.registry", "Check an artifact's signatures, digests and lengths."),
    "ls": ("smolbuild.cli.artifacts", "List the artifacts of the local store."),
    "inspect": ("smolbuild.cli.artifacts", "Show what an artifact is made of."),
    "export": ("smolbuild.cli.export", "Write an artifact as an image, a directory or a disk."),
    "diff": ("smolbuild.cli.diff", "Show how one artifact differs from another."),
    "rm": ("smolbuild.cli.artifacts", "Remove artifacts from the local store."),
    "cache": ("smolbuild.cli.cache", "List and prune the step cache."),
    "key": ("smolbuild.cli.keys", "Generate and show signing keys."),
    "doctor": ("smolbuild.cli.doctor", "Say what this host offers and what it lacks."),
}

_OF_A_SMOLFILE = ("build", "plan", "lock")

_EPILOG = """\b
Examples:
  smolbuild build -t notes:v1
  smolbuild run notes:v1 -n 3 -- cat /etc/hostname
  smolbuild push notes:v1 registry.example.com/team/notes:v1

\b
Exit status: 0 ok, 1 failed, 2 usage or Smolfile, 3 health check or residue, 4 verification,
5 registry or network (trying again may help), 6 outcome unknown, 75 busy, 130/143 signals.
"""


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is used: start-up stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command = getattr(module, f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            import difflib

            close = difflib.get_close_matches(name, _COMMANDS, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
@click.version_option(__version__, prog_name="smolbuild", message="%(prog)s %(version)s")
def _root() -> None:
    """Build proven, signed, restorable machine artifacts from a Smolfile."""


class _Terminated(BaseException):
    """SIGTERM arrived; unwinds through every context manager, like Ctrl-C does."""


def main() -> NoReturn:
    """Run the process's command line and exit with the status that README.md lists."""
    _leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors are shown, not raised."""
    signal.signal(signal.SIGTERM, _on_term)
    signal.signal(signal.SIGHUP, _on_term)
    try:
        result: Any = _root.main(args=list(arguments), prog_name="smolbuild", standalone_mode=False)
        status = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except SmolbuildError as error:
        status = report(error, as_json=_wants_json(arguments))
    except click.ClickException as error:
        status = _report_click(error, as_json=_wants_json(arguments))
    except (KeyboardInterrupt, click.Abort):
        status = _ended("interrupted", 130, as_json=_wants_json(arguments))
    except _Terminated:
        status = _ended("terminated", 143, as_json=_wants_json(arguments))
    except BrokenPipeError:
        # The reader of our output went away (`smolbuild ls | head`): not our failure.
        _send_nowhere(sys.stdout)
        status = 141
    except OSError as error:
        status = report(_os_error(error), as_json=_wants_json(arguments))
    except Exception as error:
        if os.environ.get("SMOLBUILD_DEBUG"):
            raise
        status = report(_defect(error), as_json=_wants_json(arguments))
    return status


def _leave(status: int) -> NoReturn:
    """End the process; at once when nothing else runs in it.

    The interpreter would free every object one by one: 15 ms, a sixth of a build with nothing to
    do. With other threads it is left to its ways, which wait for them.
    """
    if threading.active_count() == 1:
        atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter offers no other name for it
        with contextlib.suppress(OSError):  # the interpreter then tries again, and says so
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    sys.exit(status)


def _on_term(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise _Terminated


def _wants_json(arguments: Sequence[str]) -> bool:
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in ours


def report(error: SmolbuildError, *, as_json: bool) -> int:
    """Show ``error`` as a command that fails does, and return its exit status."""
    if as_json:
        print(json.dumps({"error": _error_json(error)}))
    if isinstance(error, SmolfileError):
        for problem in error.problems:
            complain(f"error: {replace(problem, file=_from_here(problem.file))}")
        return error.exit_status
    show_error(f"error: {error.message}", error)
    return error.exit_status


def _from_here(file: str) -> str:
    """Return ``file`` as a person in the current directory would name it."""
    return file.removeprefix(f"{Path.cwd()}/")


def show_error(first: str, error: SmolbuildError) -> None:
    """Write an error on standard error: the line ``first``, its details, its hint."""
    complain(first)
    if error.details:
        complain(error.details)
    if error.hint:
        complain(f"hint: {error.hint}")


def complain(text: str) -> None:
    """Write ``text`` on standard error."""
    print(visible(text), file=sys.stderr)


def _error_json(error: SmolbuildError) -> dict[str, object]:
    value: dict[str, object] = {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
        "exitStatus": error.exit_status,
    }
    if isinstance(error, SmolfileError):
        value["problems"] = [
            {
                "file": problem.file,
                "line": problem.line,
                "key": problem.key,
                "message": problem.message,
                "hint": problem.hint,
            }
            for problem in error.problems
        ]
    return value


def _report_click(error: click.ClickException, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": _error_json(UsageError(error.format_message()))}))
        print(f"error: {error.format_message()}", file=sys.stderr)
    else:
        error.show(sys.stderr)
        command = (
            error.ctx.command.name if isinstance(error, click.UsageError) and error.ctx else ""
        )
        if command in _OF_A_SMOLFILE and "extra argument" in error.format_message():
            complain(
                "hint: -C names the Smolfile's directory, -f the file, -t of build the artifact"
            )
    return error.exit_code


def _ended(how: str, status: int, *, as_json: bool) -> int:
    if as_json:
        error = _error_json(SmolbuildError(how, code=how)) | {"exitStatus": status}
        print(json.dumps({"error": error}))
    with contextlib.suppress(OSError):  # a terminal that was hung up: nobody is there to read it
        print(f"smolbuild: {how}", file=sys.stderr, flush=True)
    # What is left in a buffer is tried again at the interpreter's end, whose failure is status 120.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _send_nowhere(stream)
    return status


def _send_nowhere(stream: TextIO) -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _defect(error: Exception) -> SmolbuildError:
    """Return what a user is told of an exception that nobody foresaw: where it came from."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else "?"
    return SmolbuildError(
        f"{type(error).__name__} at {where}: {error}",
        hint="this is a defect of smolbuild: please report it, with what SMOLBUILD_DEBUG=1 shows",
        code="defect",
    )


def _os_error(error: OSError) -> SmolbuildError:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return HostError(
            f"{error.strerror}{where}",
            hint="free some space, run `smolbuild rm`, or set SMOLBUILD_HOME to a larger disk",
            code="no-space",
        )
    return SmolbuildError(f"{error.strerror or error}{where}", code="os-error")
