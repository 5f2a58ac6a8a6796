"""``smolbuild build --watch``: build, wait for a change, build again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from smolbuild.build.watch import Stamp, Watched, await_change, look, watched_of
from smolbuild.cli import render
from smolbuild.cli.main import report
from smolbuild.core.clock import SystemClock
from smolbuild.core.errors import SmolbuildError
from smolbuild.core.events import Message
from smolbuild.core.text import counted
from smolbuild.model.lock import lock_path

__all__ = ["watch_builds"]

_NAMED = 3


def watch_builds(
    path: Path, environment: Mapping[str, str], once: Callable[[], object], progress: str
) -> NoReturn:
    """Call ``once`` now and whenever an input of the Smolfile ``path`` changed, until a signal.

    What changes while a build runs starts another one after it. A build that fails is shown, and
    watching goes on.
    """
    clock = SystemClock()
    watched = None
    while True:
        watched = watched_of(path, environment, watched)
        seen = look(watched)
        try:
            once()
        except SmolbuildError as error:
            report(error, as_json=False)
        seen = _with_own_lock(seen, watched)
        _say(f"watching {counted(len(seen), 'path')}; Ctrl-C ends", progress)
        changed = await_change(watched, seen, clock)
        _say(f"changed: {_listed(changed, path.parent)}", progress)


def _with_own_lock(seen: Mapping[str, Stamp], watched: Watched) -> dict[str, Stamp]:
    """Return ``seen`` with the lock as it is now: a build writes it itself."""
    lock = str(lock_path(watched.smolfile))
    stamps = {name: stamp for name, stamp in seen.items() if name != lock}
    now = look(watched)
    return {**stamps, lock: now[lock]} if lock in now else stamps


def _say(text: str, progress: str) -> None:
    with render.progress(progress) as emit:
        emit(Message(level="info", text=text))


def _listed(changed: tuple[str, ...], directory: Path) -> str:
    names = [name.removeprefix(f"{directory}/") for name in changed[:_NAMED]]
    more = len(changed) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
