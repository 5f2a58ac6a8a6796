"""What ``smolbuild build`` does with the machine of a build that fails."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from smolbuild.cli.main import complain, report
from smolbuild.core.errors import SmolbuildError
from smolbuild.core.events import Emit, Message

if TYPE_CHECKING:
    from smolbuild.build.context import BuildContext
    from smolbuild.build.kept import Failed, KeptMachine
    from smolbuild.core.home import Home
    from smolbuild.machine.base import Machine
    from smolbuild.machine.rundir import RunDirectory

__all__ = ["Keeper", "build_with_person", "on_disk"]

_ASK = "[s]hell in a copy of the machine, [r]etry from the step before, [q]uit: "


class Keeper:
    """Keeps the machine of a failed build for the person at the terminal, until ``drop``."""

    def __init__(self) -> None:
        self.kept: KeptMachine | None = None
        self._run: RunDirectory | None = None
        self._home: Home | None = None

    def keep(self, context: "BuildContext", machine: "Machine", failed: "Failed") -> None:
        """Keep ``machine``; that it cannot be kept is a warning, the failure stands anyway."""
        from smolbuild.build.kept import keep_machine, live_directory
        from smolbuild.machine.rundir import RunDirectory

        with _warned(context.emit):
            self._home = context.home
            self._run = RunDirectory.create(context.home)
            self.kept = keep_machine(
                machine, failed, live_directory(self._run.path), now=context.now()
            )

    def shell(self, environment: Mapping[str, str]) -> None:
        """Open a shell in a fork of the machine; an error is shown."""
        from smolbuild.build.kept import live_directory
        from smolbuild.cli.debug import shell_in_fork

        if self.kept is None or self._run is None or self._home is None:
            return
        try:
            shell_in_fork(self._home, live_directory(self._run.path), self.kept, environment)
        except SmolbuildError as error:
            report(error, as_json=False)

    def drop(self) -> None:
        """Forget the machine, and remove its files. Idempotent."""
        run, self._run, self.kept = self._run, None, None
        if run is not None:
            run.remove()


def build_with_person(
    once: Callable[[Keeper], object], environment: Mapping[str, str], *, shell: bool
) -> int:
    """Build; when a step or what comes after it fails, ask what to do, until it works or is left.

    Args:
        once: builds, and gives the machine of a failure to the keeper.
        environment: TERM is taken from it.
        shell: open a shell first, ask then.

    Returns:
        0, or the exit status of the failure, which was shown.

    Raises:
        SmolbuildError: a failure that left no machine to look at.

    """
    keeper = Keeper()
    try:
        while True:
            try:
                once(keeper)
            except SmolbuildError as error:
                if keeper.kept is None:
                    raise
                status = report(error, as_json=False)
                if shell:
                    keeper.shell(environment)
                if not _wants_retry(keeper, environment):
                    return status
                keeper.drop()
            else:
                return 0
    finally:
        keeper.drop()


def _wants_retry(keeper: Keeper, environment: Mapping[str, str]) -> bool:
    while True:
        try:
            answer = _answer()
        except KeyboardInterrupt:
            complain("")
            return False
        if answer in {"s", "shell"}:
            keeper.shell(environment)
        elif answer in {"r", "retry"}:
            return True
        elif answer in {"q", "quit", None}:
            return False


def _answer() -> str | None:
    """Ask, and return what was typed; None when nobody is there any more."""
    print(_ASK, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip().lower() if line else None


def on_disk(context: "BuildContext", machine: "Machine", failed: "Failed") -> None:
    """Keep ``machine`` for a later ``smolbuild debug``; never one that secrets passed through."""
    from smolbuild.build.kept import KeptMachines

    if failed.guarded:
        text = (
            "the machine is not kept: secrets passed through it, and what is kept lies on the "
            "disk; build on a terminal to look at it while the build waits"
        )
        context.emit(Message(level="warning", text=text))
        return
    with _warned(context.emit):
        record = KeptMachines(context.home).keep(machine, failed, now=context.now())
        text = (
            f"the machine is kept as it stood when {failed.what} failed: "
            f"`smolbuild debug {record.name}` opens a shell in a copy of it, "
            f"`smolbuild debug --rm {record.name}` drops it"
        )
        context.emit(Message(level="info", text=text))


@contextlib.contextmanager
def _warned(emit: Emit) -> Iterator[None]:
    try:
        yield
    except (SmolbuildError, OSError) as error:
        text = f"the machine cannot be kept: {error}"
        emit(Message(level="warning", text=text))
