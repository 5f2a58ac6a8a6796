"""``smolbuild run``."""

import os
import threading
from typing import IO, Literal

import click

from smolbuild.attempt.run import Attempt, run_forks
from smolbuild.cli import render
from smolbuild.cli.main import complain, show_error
from smolbuild.cli.options import home, json_option, print_json, progress_option
from smolbuild.core.text import counted
from smolbuild.machine.qemu import QemuEngine
from smolbuild.store.artifact import open_artifact
from smolbuild.store.layout import Store
from smolbuild.store.materialise import materialise

__all__ = ["run"]

_KEPT = 1 << 20
_LONG_LINE = 64 * 1024
_MARK = "The command for the forks goes after `--`: smolbuild run ARTIFACT -- CMD..."


class _Run(click.Command):
    """Takes a command only after ``--``: its options must never be taken for ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        marked = args.index("--") if "--" in args else len(args)
        after = len(args) - marked - 1
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} {_MARK}", ctx) from error
        command: tuple[str, ...] = ctx.params["command"]
        if len(command) > max(after, 0):
            raise click.UsageError(f"{command[0]!r} stands before `--`. {_MARK}", ctx)
        return rest


@click.command(
    cls=_Run,
    epilog="""\b
Examples:
  smolbuild run notes:v1 -- psql -h 127.0.0.1 -U postgres -c 'select count(*) from notes'
  smolbuild run notes:v1 -n 3 -- hostname
  smolbuild run notes:v1 -i -- sh < script.sh
""",
)
@click.argument("artifact")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
@click.option("-n", "count", default=1, show_default=True, help="Number of forks.")
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input to the command.")
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds for the command.")
@click.option("--no-health", is_flag=True, help="Hand the fork out without a health check.")
@json_option
@progress_option
def run(
    artifact: str,
    command: tuple[str, ...],
    count: int,
    *,
    interactive: bool,
    timeout: float,
    no_health: bool,
    as_json: bool,
    progress: str,
) -> int:
    """Restore N forks of ARTIFACT, run CMD in each, pass output and exit status through.

    Without CMD the artifact's entrypoint and cmd run. Every fork is discarded afterwards. With
    several forks each output line is marked with its fork's number, and the exit status is the
    first that is not 0.
    """
    place = home()
    store = Store(place.store)
    loaded = open_artifact(store, artifact)
    output = _Collected() if as_json else _Through(count)
    # Live progress would mix with the command's own output.
    with render.progress("plain" if progress == "auto" else progress) as emit:
        files = materialise(store, loaded, place.materialised, emit=emit)
        engine = QemuEngine(place, emit=emit)
        engine.contract()  # the host's first probe of KVM is not part of any fork's time
        attempts = run_forks(
            engine,
            files,
            loaded.config,
            count=count,
            argv=command,
            on_output=output,
            stdin=_standard_input() if interactive else None,
            timeout=timeout,
            health=not no_health,
        )
    if isinstance(output, _Through):
        output.finish()
        has_command = command or loaded.config.run.entrypoint or loaded.config.run.cmd
        if not has_command and all(attempt.error is None for attempt in attempts):
            complain(
                f"restored and discarded {counted(count, 'fork')} of {artifact}; it has no command "
                "of its own, so nothing ran: give one after `--`"
            )
    else:
        print_json({"digest": loaded.index.descriptor.digest, "forks": output.rows(attempts)})
    for attempt in attempts:
        _complain(attempt)
    return next((a.status for a in attempts if a.status != 0), 0)


def _standard_input() -> IO[bytes]:
    # Not sys.stdin.buffer: it waits for a full buffer, and the interpreter cannot end while a
    # thread waits in it.
    return open(0, "rb", buffering=0, closefd=False)


def _complain(attempt: Attempt) -> None:
    if attempt.error is not None:
        show_error(f"error: fork {attempt.number}: {attempt.error.message}", attempt.error)
    elif attempt.timed_out:
        complain(f"error: fork {attempt.number}: the command was killed: timeout")


class _Through:
    """Passes output through: as it is for one fork, line by line with a mark for several."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._partial: dict[tuple[int, str], bytes] = {}

    def __call__(self, number: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        target = 1 if stream == "stdout" else 2
        with self._lock:
            if self._count > 1:
                data = self._marked(number, stream, data)
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]

    def finish(self) -> None:
        """Write the last lines that had no line end."""
        for (number, stream), rest in sorted(self._partial.items()):
            if rest:
                os.write(1 if stream == "stdout" else 2, b"[%d] %s\n" % (number, rest))

    def _marked(self, number: int, stream: str, data: bytes) -> bytes:
        *lines, rest = (self._partial.pop((number, stream), b"") + data).split(b"\n")
        if len(rest) > _LONG_LINE:  # a line without end is cut, not kept
            lines.append(rest)
            rest = b""
        self._partial[number, stream] = rest
        return b"".join(b"[%d] %s\n" % (number, line) for line in lines)


class _Collected:
    """Collects output for ``--json``: the last MiB of each stream of each fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[tuple[int, str], bytearray] = {}

    def __call__(self, number: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        with self._lock:
            kept = self._data.setdefault((number, stream), bytearray())
            kept.extend(data)
            del kept[:-_KEPT]

    def text(self, number: int, stream: str) -> str:
        return bytes(self._data.get((number, stream), b"")).decode("utf-8", "backslashreplace")

    def rows(self, attempts: tuple[Attempt, ...]) -> list[dict[str, object]]:
        return [
            {
                "number": attempt.number,
                "id": attempt.fork_id,
                "how": attempt.how,
                "agent_ms": attempt.milestones.get("agent"),
                "ready_ms": attempt.milestones.get("ready"),
                "milestones": attempt.milestones,
                "status": attempt.status,
                "timedOut": attempt.timed_out,
                "stdout": self.text(attempt.number, "stdout"),
                "stderr": self.text(attempt.number, "stderr"),
                "error": attempt.error.message if attempt.error else None,
            }
            for attempt in attempts
        ]
