"""``smolbuild cache ls`` and ``cache prune``."""

import datetime as dt
import os
import time
from pathlib import Path

import click

from smolbuild.build.evict import CachedItem, evict, list_cache
from smolbuild.cli.describe import print_table
from smolbuild.cli.options import home, json_option, print_json
from smolbuild.core.text import counted, visible
from smolbuild.model.durations import parse_duration, parse_size
from smolbuild.model.smolfile import CachePolicy

__all__ = ["cache"]


@click.group()
def cache() -> None:
    """List and prune the step cache: what builds resume from."""


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None or value == "0":
        return None if value is None else 0
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@cache.command(name="ls", epilog="Example:  smolbuild cache ls --json")
@json_option
def list_steps(*, as_json: bool) -> None:
    """List the steps in the cache, the one used last first, and what else is cached."""
    place = home()
    steps = list_cache(place.cache)
    others = _others(place.cache)
    total = sum(step.disk_bytes + step.memory_bytes for step in steps)
    if as_json:
        print_json(
            {
                "path": str(place.cache),
                "bytes": total,
                "steps": [_json(step) for step in steps],
                "others": others,
            }
        )
        return
    if steps:
        print_table(
            [("ARTIFACT", "STEP", "DISK", "MEMORY", "USED", "KEY")]
            + [
                (
                    visible(step.artifact) or "?",
                    visible(step.step) or "damaged",
                    _size(step.disk_bytes),
                    _size(step.memory_bytes) if step.memory_bytes else "-",
                    "now" if step.in_use else _moment(step.used_at),
                    step.key[:12],
                )
                for step in steps
            ]
        )
    click.echo(f"{counted(len(steps), 'step')}, {_size(total)} in {place.cache}")
    rest = ", ".join(f"{name} {_size(size)}" for name, size in others.items() if size)
    if rest:
        click.echo(f"not counted: {rest}")


@cache.command(
    epilog="""\b
Examples:
  smolbuild cache prune
  smolbuild cache prune --max-size 5GiB --dry-run
  smolbuild cache prune --older-than 7d --max-size 20GiB
  smolbuild cache prune --all
""",
)
@click.option("--all", "everything", is_flag=True, help="Remove every step that no build needs.")
@click.option(
    "--max-size",
    "max_bytes",
    callback=_bytes,
    metavar="SIZE",
    default=None,
    help="Remove what was used longest ago until this much is left.  [default: 20GiB]",
)
@click.option(
    "--older-than",
    "age",
    callback=_seconds,
    metavar="TIME",
    default=None,
    help="Remove what was not used for this long (7d, 12h).",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def prune(
    *,
    everything: bool,
    max_bytes: int | None,
    age: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove steps from the cache; nothing that a running build needs."""
    if everything and (max_bytes is not None or age is not None):
        raise click.UsageError("--all removes every step: leave out --max-size and --older-than")
    limit = CachePolicy().max_size if max_bytes is None else max_bytes
    done = evict(
        home().cache,
        max_bytes=0 if everything else limit,
        older_than=None if age is None else time.time() - age,
        dry_run=dry_run,
    )
    if as_json:
        print_json(
            {
                "dryRun": dry_run,
                "steps": done.steps,
                "memories": done.memories,
                "freed": done.freed,
                "left": done.left,
                "inUse": done.in_use,
            }
        )
        return
    would = "would remove" if dry_run else "removed"
    of_more = f" and the memory of {counted(done.memories, 'other')}" if done.memories else ""
    click.echo(f"{would} {counted(done.steps, 'step')}{of_more}: {_size(done.freed)}")
    needed = f", {_size(done.in_use)} of it needed by running builds" if done.in_use else ""
    click.echo(f"{_size(done.left)} {'would be ' if dry_run else ''}left{needed}")


def _json(step: CachedItem) -> dict[str, object]:
    return {
        "artifact": step.artifact,
        "step": step.step,
        "chainKey": f"sha256:{step.key}",
        "diskBytes": step.disk_bytes,
        "memoryBytes": step.memory_bytes,
        "usedAt": dt.datetime.fromtimestamp(step.used_at, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "inUse": step.in_use,
    }


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def _others(place: Path) -> dict[str, int]:
    """Return the bytes on the disk of each other part of the cache."""
    sizes = {}
    with os.scandir(place) as listing:
        for entry in listing:
            if entry.is_dir(follow_symlinks=False) and entry.name != "steps":
                sizes[entry.name] = _allocated(Path(entry.path))
    return dict(sorted(sizes.items()))


def _allocated(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += (Path(folder) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue  # a build has just moved it
    return total
