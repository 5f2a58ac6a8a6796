"""Options and set-up that several commands share."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from smolbuild.core.files import sweep_temporaries
from smolbuild.core.home import Home, open_home

__all__ = [
    "cache_options",
    "drift_option",
    "file_options",
    "has_person",
    "home",
    "json_option",
    "print_json",
    "progress_option",
    "smolfile_path",
]

_LEFT_OVER_SECONDS = 24 * 3600.0
"""Nothing that is still being written stays untouched for so long."""

_SWEEP_SECONDS = 3600.0
"""Files that became leftovers a day ago can wait so long for the next look."""

F = TypeVar("F", bound=Callable[..., Any])


def file_options(command: F) -> F:
    """Add ``-f/--file`` and ``-C``."""
    command = click.option(
        "-f",
        "--file",
        "file",
        type=click.Path(path_type=Path),
        default=None,
        help="The Smolfile to read.  [default: Smolfile]",
    )(command)
    return click.option(
        "-C",
        "directory",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        default=None,
        help="Work in DIR instead of the current directory.",
        metavar="DIR",
    )(command)


def cache_options(command: F) -> F:
    """Add ``--cache-registry`` and ``--no-cache-registry``."""
    command = click.option(
        "--no-cache-registry", "cache_registry", flag_value="", help="Use no remote cache."
    )(command)
    return click.option(
        "--cache-registry",
        "cache_registry",
        metavar="REPOSITORY",
        default=None,
        help="Look here for the artifact before building it.  [default: "
        "SMOLBUILD_CACHE_REGISTRY, then [smolbuild.cache] registry]",
    )(command)


def drift_option(command: F) -> F:
    """Add ``--check-drift``."""
    return click.option(
        "--check-drift",
        is_flag=True,
        help="Ask now whether tag, suite and kernel still name what is locked. Otherwise asked at "
        "most once an hour, where [smolbuild.policy] on_base_drift is set.",
    )(command)


def json_option(command: F) -> F:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on standard output."
    )(command)


def progress_option(command: F) -> F:
    """Add ``--progress``."""
    return click.option(
        "--progress",
        type=click.Choice(["auto", "plain", "json", "none"]),
        default="auto",
        show_default=True,
        help="How progress is shown on standard error.",
    )(command)


def has_person(environment: Mapping[str, str]) -> bool:
    """Return whether there is a person to ask: input and output are terminals, and it is no CI."""
    return sys.stdin.isatty() and sys.stderr.isatty() and not environment.get("CI")


def home() -> Home:
    """Return the state directory of this command, leftovers of killed commands swept."""
    from smolbuild.machine.rundir import sweep

    opened = open_home(os.environ)
    sweep(opened)
    stamp = opened.locks / "last-sweep"
    if _is_due(stamp):
        stamp.touch(mode=0o600)
        blobs = opened.store / "blobs" / "sha256"
        for directory in (blobs, opened.materialised, *_parts_of(opened)):
            sweep_temporaries(directory, older_than=_LEFT_OVER_SECONDS)
    return opened


def _is_due(stamp: Path) -> bool:
    """Return whether nobody looked for leftovers lately: a store has thousands of files."""
    try:
        return abs(time.time() - stamp.stat().st_mtime) > _SWEEP_SECONDS
    except FileNotFoundError:
        return True


def _parts_of(place: Home) -> list[Path]:
    """Return the caches, each of which may hold what a killed command was writing."""
    with os.scandir(place.cache) as listing:
        return [Path(entry.path) for entry in listing if entry.is_dir(follow_symlinks=False)]


def smolfile_path(file: Path | None, directory: Path | None) -> Path:
    """Return the Smolfile that ``-f`` and ``-C`` name, as an absolute path."""
    base = directory if directory is not None else Path()
    return (base / (file if file is not None else "Smolfile")).absolute()


def print_json(value: Mapping[str, object]) -> None:
    """Print the one JSON document of this command: a line for each member and each list's item."""
    members = (f"  {_encode(key)}: {_laid_out(item)}" for key, item in value.items())
    sys.stdout.write("{\n" + ",\n".join(members) + "\n}\n")


_encode = json.JSONEncoder().encode
"""Without ``indent``, for which the standard library's encoder is in Python and five times slower:
a plan can have ten thousand inputs."""


def _laid_out(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(f"    {_encode(item)}" for item in value) + "\n  ]"
    if isinstance(value, Mapping) and value:
        members = (f"    {_encode(str(key))}: {_encode(item)}" for key, item in value.items())
        return "{\n" + ",\n".join(members) + "\n  }"
    return _encode(value)
