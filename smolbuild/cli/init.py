"""``smolbuild init`` and ``import``: a first Smolfile."""

import os
import posixpath
from pathlib import Path

import click

from smolbuild.cli.options import json_option, print_json
from smolbuild.core.errors import UsageError
from smolbuild.core.files import write_atomic
from smolbuild.model.reference import artifact_name
from smolbuild.starter.draft import Draft, draft_text

__all__ = ["import_", "init"]

_IGNORE = ".smolbuildignore"
_ALWAYS_IGNORED = (".git/", ".idea/", ".vscode/", "/Smolfile*", f"/{_IGNORE}")


@click.command(epilog="Example:  smolbuild init && smolbuild build")
@click.argument(
    "directory", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path()
)
@click.option("--force", is_flag=True, help="Overwrite a Smolfile that is there.")
@json_option
def init(*, directory: Path, force: bool, as_json: bool) -> None:
    """Look at DIRECTORY and write a first Smolfile for it, with a health check that can fail.

    Knows Python, Node.js, Go and Rust projects; of others the files are copied. What only you can
    know is written as a comment. Starts nothing and asks nobody.
    """
    from smolbuild.starter.indexes import index_hosts
    from smolbuild.starter.look import look_at
    from smolbuild.starter.starters import IGNORED, first_draft

    directory = directory.absolute()
    target = directory / "Smolfile"
    _refuse_to_overwrite(target, force=force)
    project = look_at(directory)
    hosts = index_hosts(project.kind, directory, os.environ)
    draft = first_draft(project, name=artifact_name(directory.name), hosts=hosts)
    written = [target]
    _write(target, draft_text(draft))
    ignore = directory / _IGNORE
    if not ignore.exists():
        _write(ignore, "\n".join((*_ALWAYS_IGNORED, *IGNORED[project.kind])) + "\n")
        written.append(ignore)
    todo = []
    if draft.network is not None and draft.network.off:
        todo.append(
            "name the hosts of your package index in the Smolfile: this host's configuration "
            "names none, so fetching the dependencies is switched off"
        )
    todo.extend(f"`smolbuild import {name}` starts from that file" for name in project.importable)
    if as_json:
        print_json(
            {
                "kind": project.kind,
                "written": [str(path) for path in written],
                "start": project.start or None,
                "port": project.serves.port,
                "hosts": list(hosts),
                "todo": todo,
            }
        )
        return
    for path in written:
        click.echo(f"wrote {path.name}")
    click.echo(
        f"found {project.kind}" + (f", started by `{project.start}`" if project.start else "")
    )
    for line in todo:
        click.echo(f"todo: {line}")


@click.command(
    name="import",
    epilog="""\b
Examples:
  smolbuild import .devcontainer/devcontainer.json
  smolbuild import Dockerfile --translate -o Smolfile
""",
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Where to write.  [default: Smolfile in the project's directory]",
)
@click.option("--translate", is_flag=True, help="Make steps of a Dockerfile of one stage.")
@click.option("--force", is_flag=True, help="Overwrite a Smolfile that is there.")
@json_option
def import_(
    *, file: Path, output: Path | None, translate: bool, force: bool, as_json: bool
) -> None:
    """Write a Smolfile to start from, out of a devcontainer.json or a Dockerfile.

    A Dockerfile is kept as the base, which a Docker engine builds, or made into steps with
    --translate. What cannot be said in a Smolfile is named on standard error and in the file.
    """
    file = file.absolute()
    root = file.parent.parent if file.parent.name == ".devcontainer" else file.parent
    target = (root / "Smolfile" if output is None else output).absolute()
    _refuse_to_overwrite(target, force=force)
    draft = _draft(file, target.parent, translate=translate)
    _write(target, draft_text(draft))
    if as_json:
        print_json({"written": [str(target)], "leftOut": list(draft.left_out)})
    else:
        click.echo(f"wrote {target.name}")
    for line in draft.left_out:
        click.echo(f"not translated: {line}", err=True)


def _draft(file: Path, root: Path, *, translate: bool) -> Draft:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}", code="not-text") from error
    name = artifact_name(root.name)
    if file.suffix == ".json":
        from smolbuild.starter.devcontainer import translate_devcontainer

        return translate_devcontainer(text, file=file, root=root, name=name)
    from smolbuild.starter.translate import keep_dockerfile, translate_dockerfile

    if translate:
        return translate_dockerfile(text, file=file.name, context=root, name=name)
    path = posixpath.relpath(file.as_posix(), root.as_posix())
    return keep_dockerfile(text, file=path, name=name)


def _refuse_to_overwrite(target: Path, *, force: bool) -> None:
    if not force and (target.exists() or target.is_symlink()):
        raise UsageError(
            f"{target} is there already",
            hint="look at it first; --force overwrites it",
            code="exists",
        )


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode(), mode=0o644)
