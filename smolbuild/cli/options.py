"""Options and set-up that several commands share."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from smolbuild.core.home import Home, open_home

__all__ = ["file_options", "home", "json_option", "print_json", "progress_option", "smolfile_path"]

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


def home() -> Home:
    """Return the state directory of this command, leftovers of killed commands swept."""
    from smolbuild.machine.rundir import sweep

    opened = open_home(os.environ)
    sweep(opened)
    return opened


def smolfile_path(file: Path | None, directory: Path | None) -> Path:
    """Return the Smolfile that ``-f`` and ``-C`` name, as an absolute path."""
    base = directory if directory is not None else Path()
    return (base / (file if file is not None else "Smolfile")).absolute()


def print_json(value: object) -> None:
    """Print the one JSON document of this command."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
