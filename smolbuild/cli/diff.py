"""``smolbuild diff``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from smolbuild.cli import render
from smolbuild.cli.describe import port_line, process_line, sizes_of
from smolbuild.cli.options import home, json_option, print_json, progress_option
from smolbuild.core.codec import encode
from smolbuild.core.text import counted, visible
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.model.inside import GuestProcess
from smolbuild.store.artifact import Artifact, open_artifact
from smolbuild.store.layout import Store

if TYPE_CHECKING:
    from smolbuild.build.compare import Came, Comparison

__all__ = ["diff"]

_GROUPS = 30
_PACKAGES = 40


@click.command(
    epilog="""\b
Examples:
  smolbuild diff notes:v1 notes:v2
  smolbuild diff notes:v1 sha256:6dbf42ce --json
  smolbuild diff notes:v1 notes:v2 --files
""",
)
@click.argument("old")
@click.argument("new")
@click.option("--files", "every_file", is_flag=True, help="Name every file; no summary.")
@json_option
@progress_option
def diff(*, old: str, new: str, every_file: bool, as_json: bool, progress: str) -> None:
    """Show how artifact NEW differs from OLD; both are local names or digests.

    Inputs, packages, files, processes and ports of the checkpoint, sizes, time to ready. Starts no
    machine: packages and files are read from the disks.
    """
    from smolbuild.build.compare import compare_artifacts

    place = home()
    store = Store(place.store)
    before, after = open_artifact(store, old), open_artifact(store, new)
    with render.progress(progress) as emit:
        found = compare_artifacts(place, store, before, after, emit=emit)
    if as_json:
        print_json(_json(before, after, found, every_file=every_file))
        return
    nothing = True
    for title, lines in _sections(before, after, found, every_file=every_file):
        shown = list(lines)
        if shown:
            click.echo(("" if nothing else "\n") + title)
            nothing = False
        for line in shown:
            click.echo(visible(f"  {line}"))
    if nothing:
        click.echo("nothing differs")


def _sections(
    old: Artifact, new: Artifact, found: "Comparison", *, every_file: bool
) -> Iterator[tuple[str, Iterator[str]]]:
    yield "inputs", _inputs(found)
    for manager, changes in found.packages.items():
        lines = [str(change) for change in changes]
        if len(lines) > _PACKAGES:
            lines[_PACKAGES:] = [f"and {len(lines) - _PACKAGES} more: --json has all"]
        yield f"packages ({manager})", iter(lines)
    yield "files", _files(found, every_file=every_file)
    yield "processes", _came(found.processes)
    yield "ports", _came(found.ports)
    if old.manifest.descriptor.digest != new.manifest.descriptor.digest:
        yield "sizes", _sizes(old, new, found)
        if any(found.ready_ms):
            was, now = (_times(times) for times in found.ready_ms)
            yield "time to ready", iter([f"{was} -> {now}"])


def _inputs(found: "Comparison") -> Iterator[str]:
    for change in found.inputs:
        yield str(change)
        if change.leaf != "base":  # the packages follow
            yield from (f"    {line}" for line in change.details)


def _files(found: "Comparison", *, every_file: bool) -> Iterator[str]:
    from smolbuild.build.disk_diff import summarise

    if every_file:
        yield from map(str, found.files)
        return
    yield from map(str, summarise(found.files, _GROUPS))
    if len(found.files) > _GROUPS:
        yield f"({counted(len(found.files), 'name')} in all: --files names each)"


def _came(came: "Came") -> Iterator[str]:
    for sign, things in (("-", came.old), ("+", came.new)):
        for each in things:
            line = process_line(each) if isinstance(each, GuestProcess) else port_line(each)
            yield f"{sign} {line}"


def _sizes(old: Artifact, new: Artifact, found: "Comparison") -> Iterator[str]:
    was, now = sizes_of(old), sizes_of(new)
    for name in was:
        yield f"{name:<7} {was[name] / 1e6:.1f} MB -> {now[name] / 1e6:.1f} MB"
    own = now["packed"] - found.shared_bytes
    yield f"shared  {found.shared_bytes / 1e6:.1f} MB packed; {own / 1e6:.1f} MB are new"


def _times(times: tuple[int, ...]) -> str:
    return ", ".join(f"{each} ms" for each in times) or "unknown"


def _json(
    old: Artifact, new: Artifact, found: "Comparison", *, every_file: bool
) -> dict[str, object]:
    from smolbuild.build.disk_diff import summarise
    from smolbuild.build.explain import changes_json

    counts = {
        kind: sum(change.kind == kind for change in found.files)
        for kind in ("added", "removed", "changed")
    }
    return {
        "old": _side(old, found.ready_ms[0]),
        "new": _side(new, found.ready_ms[1]),
        "inputs": changes_json(found.inputs, _steps(new.config)),
        "packages": {
            manager: [encode(change) for change in changes]
            for manager, changes in found.packages.items()
        },
        "files": {
            **counts,
            "groups": [
                {
                    "path": group.path,
                    "added": group.added,
                    "removed": group.removed,
                    "changed": group.changed,
                }
                for group in summarise(found.files, _GROUPS)
            ],
            "changes": [encode(change) for change in found.files] if every_file else None,
        },
        "processes": encode(found.processes),
        "ports": encode(found.ports),
        "sharedBytes": found.shared_bytes,
    }


def _side(artifact: Artifact, ready_ms: tuple[int, ...]) -> dict[str, object]:
    return {
        "name": artifact.config.name,
        "digest": artifact.index.descriptor.digest,
        "key": artifact.config.key,
        "created": artifact.config.created,
        "sizes": sizes_of(artifact),
        "ready_ms": list(ready_ms),
    }


def _steps(config: ArtifactConfig) -> tuple[str, ...]:
    from smolbuild.model.keytree import tree_from_json

    leaves = tree_from_json(config.key_tree).leaves
    return tuple(name.removeprefix("step ") for name in leaves if name.startswith("step "))
