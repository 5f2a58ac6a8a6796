"""``smolbuild debug``: look into the machine of a build that failed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click

from smolbuild.build.kept import KeptMachine, KeptMachines, fork_kept
from smolbuild.cli.main import complain
from smolbuild.cli.options import home, json_option, print_json
from smolbuild.cli.terminal import SHELL, interactive
from smolbuild.core.errors import UsageError
from smolbuild.core.events import silent
from smolbuild.core.home import Home
from smolbuild.core.text import counted, visible
from smolbuild.machine.base import ExecRequest
from smolbuild.machine.qemu import QemuEngine

__all__ = ["debug", "shell_in_fork"]

_COMMAND_SECONDS = 3600.0


class _Debug(click.Command):
    """Takes what follows ``--`` for the command, so that NAME may be left out before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:at])
        ctx.params["command"] = tuple(args[at + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


@click.command(
    cls=_Debug,
    epilog="""\b
Examples:
  smolbuild build --debug-on-failure; smolbuild debug
  smolbuild debug acme/agent-env -- cat /var/log/setup.log
  smolbuild debug --ls
  smolbuild debug --rm acme/agent-env
""",
)
@click.argument("name", required=False)
@click.option("--ls", "listing", is_flag=True, help="List the machines that are kept.")
@click.option("--rm", "removing", is_flag=True, help="Drop the machine kept of NAME.")
@json_option
def debug(
    name: str | None, command: tuple[str, ...], *, listing: bool, removing: bool, as_json: bool
) -> int:
    """Open a shell, or run CMD, in a copy of the machine of a failed build.

    `smolbuild build --debug-on-failure` keeps the machine as it stood when a step, a service or the
    health check failed: the last one of each artifact name. What is changed in a copy is thrown
    away. NAME is the artifact's; it may be left out while only one machine is kept.
    """
    place = home()
    kept = KeptMachines(place)
    if listing + removing + bool(command) > 1 or (as_json and not listing):
        raise UsageError("--ls, --rm and a command exclude each other; --json is for --ls")
    if listing:
        _show(kept, as_json=as_json)
        return 0
    if removing:
        if name is None:
            raise UsageError("--rm needs the NAME of what is to go", hint="smolbuild debug --ls")
        click.echo(f"dropped {counted(kept.drop(name), 'machine')}")
        return 0
    directory, record = kept.find(name)
    if command:
        return _run(place, directory, record, command)
    return shell_in_fork(place, directory, record, os.environ)


def shell_in_fork(
    place: Home, directory: Path, record: KeptMachine, environment: Mapping[str, str]
) -> int:
    """Open a shell for the user in a fork of a kept machine, and return its exit status.

    Raises:
        UsageError: there is no terminal.
        MachineError: the fork cannot be made.

    """
    if not os.isatty(0):
        raise UsageError(
            "standard input is no terminal", hint="give a command: smolbuild debug NAME -- CMD"
        )
    machine = fork_kept(QemuEngine(place, emit=silent), directory, record)
    try:
        complain(f"a copy of the machine as it stood when {record.what} failed; Ctrl-D leaves it")
        for line in record.command.splitlines():
            complain(f"  {line}")
        return interactive(machine, _request(record, SHELL), environment).status
    finally:
        machine.discard()


def _run(place: Home, directory: Path, record: KeptMachine, command: tuple[str, ...]) -> int:
    def show(stream: Literal["stdout", "stderr"], data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1 if stream == "stdout" else 2, view) :]

    machine = fork_kept(QemuEngine(place, emit=silent), directory, record)
    try:
        return machine.exec(_request(record, command), show).status
    finally:
        machine.discard()


def _request(record: KeptMachine, command: tuple[str, ...]) -> ExecRequest:
    return ExecRequest(
        argv=command,
        env=record.run.env,
        workdir=record.run.workdir,
        user=record.run.user,
        timeout=_COMMAND_SECONDS,
    )


def _show(kept: KeptMachines, *, as_json: bool) -> None:
    found = kept.all()
    if as_json:
        rows = [
            {
                "name": record.name,
                "what": record.what,
                "error": record.error,
                "created": record.created,
                "bytes": _size(directory),
            }
            for directory, record in found
        ]
        print_json({"kept": rows})
        return
    for directory, record in found:
        size = _size(directory) / 1e6
        click.echo(visible(f"{record.name}  {record.created}  {record.what}  {size:.0f} MB"))


def _size(directory: Path) -> int:
    """Return the bytes that go with the directory: what has a second name elsewhere stays."""
    found = [path.stat() for path in directory.iterdir()]
    return sum(status.st_blocks * 512 for status in found if status.st_nlink == 1)
