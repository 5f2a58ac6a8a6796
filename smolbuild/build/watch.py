"""Notice that a declared input changed, by looking again and again.

Looking works on every file system and in every container, which a kernel's notifications do not,
and sees exactly what a build would read: 10,000 files cost some 30 ms, and the pause between two
looks is ten times what a look costs.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from smolbuild.build.files import IGNORE_FILE, declared_sources, ignore_rules
from smolbuild.build.ignore import IgnoreRules, parse_ignore
from smolbuild.core.clock import Clock
from smolbuild.core.errors import Problem, SmolbuildError
from smolbuild.core.values import dataclass
from smolbuild.model.lock import lock_path
from smolbuild.model.parse import parse_smolfile, sibling_path
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.select import LocalImage, select_image

__all__ = ["Stamp", "Watched", "await_change", "look", "watched_of"]

QUIET_SECONDS = 0.3
"""A change counts as complete when nothing more changed for so long."""
_CHURN_SECONDS = 10.0
"""What changes all the time is built all the same, after so long."""
_LOOK_SHARE = 10

_ALL = parse_ignore(())

Stamp = tuple[int, ...]
"""Of a file: its kind and mode, number, size and times; of a directory: that it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a build of one Smolfile reads."""

    smolfile: Path
    sources: tuple[str, ...] = ()
    """Declared by copies and inputs, relative to the Smolfile's directory."""
    others: tuple[Path, ...] = ()
    """Other files, and directories with all that is in them: a local image, a kernel."""
    contexts: tuple[Path, ...] = ()
    """Directories that a Dockerfile is built in."""


def watched_of(path: Path, environment: Mapping[str, str], last: Watched | None) -> Watched:
    """Return what a build of ``path`` reads; while it is wrong, what it read before."""
    try:
        smolfile = parse_smolfile(path, environment=environment)
    except (SmolbuildError, OSError):
        return last or Watched(smolfile=path)
    contexts: tuple[Path, ...] = ()
    if isinstance(smolfile.base, Dockerfile):
        contexts = (path.parent / smolfile.base.context,)
    return Watched(
        smolfile=path,
        sources=tuple(declared_sources(smolfile)),
        others=tuple(_others(smolfile)),
        contexts=contexts,
    )


def look(watched: Watched) -> Mapping[str, Stamp]:
    """Return the stamp of everything that is there and watched, by path."""
    directory = watched.smolfile.parent
    problems: list[Problem] = []
    rules = ignore_rules(directory, watched.smolfile, problems)
    seen: dict[str, Stamp] = {}
    declared: dict[str, Stamp] = {}
    named = (
        watched.smolfile,
        sibling_path(watched.smolfile),
        lock_path(watched.smolfile),
        directory / IGNORE_FILE,
    )
    for path in named:
        _see(str(path), seen)
    for source in watched.sources:
        _see_all(os.path.normpath(directory / source), declared, str(directory), rules)
    others: dict[str, Stamp] = {}
    for path in watched.others:
        top = os.path.realpath(path)
        _see_all(top, others, top, _ALL)
    # Often the Smolfile's directory: no part of any image is what changes there by itself.
    rules = parse_ignore((".git", f"/{lock_path(watched.smolfile).name}"))
    for path in watched.contexts:
        top = os.path.realpath(path)
        _see_all(top, others, top, rules)
    return {**others, **declared, **seen}


def await_change(watched: Watched, seen: Mapping[str, Stamp], clock: Clock) -> tuple[str, ...]:
    """Wait until what is watched differs from ``seen`` and has come to rest.

    Waits for a person, so it has no deadline. Returns the paths that changed.
    """
    while True:
        began = clock.monotonic()
        now = look(watched)
        if now != seen:
            break
        clock.sleep(max(QUIET_SECONDS, _LOOK_SHARE * (clock.monotonic() - began)))
    until = clock.monotonic() + _CHURN_SECONDS
    while clock.monotonic() < until:
        clock.sleep(QUIET_SECONDS)
        before, now = now, look(watched)
        if now == before:
            break
    paths = sorted(path for path in seen.keys() | now.keys() if seen.get(path) != now.get(path))
    if not paths:  # it is again as it was
        return await_change(watched, seen, clock)
    return tuple(paths)


def _others(smolfile: Smolfile) -> Iterator[Path]:
    if smolfile.kernel_path is not None:
        yield smolfile.kernel_path
    directory = smolfile.path.parent
    for name in smolfile.ca_files:
        yield directory / name
    if isinstance(smolfile.base, Dockerfile):
        yield directory / smolfile.base.dockerfile
    if smolfile.image:
        try:
            source = select_image(smolfile.image, directory)
        except SmolbuildError:
            yield directory / smolfile.image  # not there yet, perhaps
        else:
            if isinstance(source, LocalImage):
                yield source.path


def _see_all(path: str, seen: dict[str, Stamp], below: str, rules: IgnoreRules) -> None:
    pending = [path]
    while pending:
        path = pending.pop()
        if not _see(path, seen):
            continue
        try:
            with os.scandir(path) as listing:
                found = [(item.path, item.is_dir(follow_symlinks=False)) for item in listing]
        except OSError:
            continue  # gone just now, or not to be read: the build will say so
        for child, is_directory in found:
            relative = child[len(below) + 1 :]
            if not rules.leaves_out(relative, directory=is_directory):
                pending.append(child)


def _see(path: str, seen: dict[str, Stamp]) -> bool:
    """Note the stamp of ``path``, and return whether it is a directory to go into."""
    if path in seen:
        return False
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    if stat.S_ISDIR(status.st_mode):
        seen[path] = (status.st_mode,)  # what is in it is looked at itself
        return True
    seen[path] = (
        status.st_mode,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    return False
