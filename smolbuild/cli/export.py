"""``smolbuild export``: artifacts and Smolfiles for use elsewhere."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from smolbuild.attempt.verify import verify_local
from smolbuild.build.export import (
    disk_tree,
    export_docker_archive,
    export_oci_archive,
    export_qcow2,
    refuse_existing,
)
from smolbuild.build.export_rootfs import export_rootfs
from smolbuild.cli import render
from smolbuild.cli.options import (
    file_options,
    home,
    json_option,
    print_json,
    progress_option,
    smolfile_path,
)
from smolbuild.core.errors import UsageError
from smolbuild.core.events import Emit, Message, PhaseFinished, PhaseStarted
from smolbuild.model.upstream_text import upstream_text
from smolbuild.store.artifact import Artifact, open_artifact
from smolbuild.store.layout import Store
from smolbuild.store.materialise import Materialised, materialise
from smolbuild.trust.keyring import trusted_keys

__all__ = ["export"]

F = TypeVar("F", bound=Callable[..., Any])

_EPILOG = """\b
Examples:
  smolbuild export docker-archive notes:v1 && docker load -i notes.docker.tar
  smolbuild export oci-archive notes:v1 -o notes.tar
  smolbuild export rootfs notes:v1 -o ./root
  smolbuild export qcow2 notes:v1 -c
  smolbuild export smolfile > Smolfile.plain
"""


@click.group(epilog=_EPILOG)
def export() -> None:
    """Write an artifact, or a Smolfile, in other people's formats.

    An artifact is verified first, as `verify` does. What is written is its disk as it stood at the
    checkpoint; the memory is not part of it. docs/docker.md says more.
    """


def _to(command: F) -> F:
    """Add the argument and the options that every form of an artifact has."""
    for decorate in (
        progress_option,
        json_option,
        click.option(
            "-o",
            "--output",
            "output",
            type=click.Path(path_type=Path),
            default=None,
            metavar="PATH",
            help="Where to write.  [default: the artifact's name, in the current directory]",
        ),
        click.argument("artifact"),
    ):
        command = decorate(command)
    return command


_force = click.option("--force", is_flag=True, help="Replace a file that is there.")
_name = click.option(
    "--name",
    default=None,
    metavar="NAME:TAG",
    help="What the image is called.  [default: the artifact's name and tag]",
)


@export.command("docker-archive", epilog="Example:  smolbuild export docker-archive notes:v1")
@_to
@_name
@_force
def docker_archive(
    artifact: str, output: Path | None, name: str | None, *, force: bool, **more: Any
) -> None:
    """Write an archive that `docker load` reads."""

    def write(loaded: Artifact, files: Materialised, path: Path, emit: Emit) -> None:
        called = _image_name(artifact, loaded, name)
        with disk_tree(files) as tree:
            export_docker_archive(tree, loaded.config, path, name=called, emit=emit)

    _export("docker-archive", artifact, output, ".docker.tar", write, force=force, **more)


@export.command("oci-archive", epilog="Example:  smolbuild export oci-archive notes:v1 -o x.tar")
@_to
@_name
@_force
def oci_archive(
    artifact: str, output: Path | None, name: str | None, *, force: bool, **more: Any
) -> None:
    """Write an OCI layout in a tar, which skopeo and others read."""

    def write(loaded: Artifact, files: Materialised, path: Path, emit: Emit) -> None:
        called = _image_name(artifact, loaded, name)
        with disk_tree(files) as tree:
            export_oci_archive(tree, loaded.config, path, name=called, emit=emit)

    _export("oci-archive", artifact, output, ".oci.tar", write, force=force, **more)


@export.command("rootfs", epilog="Example:  smolbuild export rootfs notes:v1 -o ./root")
@_to
@click.option("--no-owner", is_flag=True, help="All files belong to you; set for a plain user.")
def rootfs(artifact: str, output: Path | None, *, no_owner: bool, **more: Any) -> None:
    """Write the files into a new or empty directory.

    Owners, devices and extended attributes are kept by root only.
    """
    import os

    owners = not no_owner and os.geteuid() == 0

    def write(loaded: Artifact, files: Materialised, path: Path, emit: Emit) -> None:
        del loaded
        if not owners:
            emit(Message(level="info", text="all files will belong to you: root keeps owners"))
        with disk_tree(files) as tree:
            losses = export_rootfs(tree, path, owners=owners, emit=emit)
        for text in losses.sentences():
            emit(Message(level="warning", text=text))

    _export("rootfs", artifact, output, "-rootfs", write, force=None, **more)


@export.command("qcow2", epilog="Example:  smolbuild export qcow2 notes:v1 -c -o notes.qcow2")
@_to
@click.option("-c", "--compress", is_flag=True, help="Compress with zstd.")
@_force
def qcow2(artifact: str, output: Path | None, *, compress: bool, force: bool, **more: Any) -> None:
    """Write the disk as a qcow2 image: one ext4 file system, no partitions, no boot loader."""

    def write(loaded: Artifact, files: Materialised, path: Path, emit: Emit) -> None:
        del loaded, emit
        export_qcow2(files, path, compress=compress)

    _export("qcow2", artifact, output, ".qcow2", write, force=force, **more)


@export.command(
    "smolfile", epilog="Example:  smolbuild export smolfile -f Smolfile > Smolfile.plain"
)
@click.argument("artifact", required=False)
@file_options
def smolfile(artifact: str | None, file: Path | None, directory: Path | None) -> None:
    """Print a Smolfile without our `[smolbuild]` table, as smolvm reads it."""
    if artifact is not None:
        raise UsageError(
            f"an artifact does not carry its Smolfile, so there is none to print of {artifact}",
            hint="name the file with -f; `smolbuild inspect` shows what the artifact is made of",
            code="no-smolfile",
        )
    path = smolfile_path(file, directory)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", code="no-smolfile") from error
    click.echo(upstream_text(text, file=str(path)), nl=False)


_Write = Callable[[Artifact, Materialised, Path, Emit], None]


def _export(
    form: str,
    artifact: str,
    output: Path | None,
    suffix: str,
    write: _Write,
    *,
    force: bool | None,
    as_json: bool,
    progress: str,
) -> None:
    """Verify the artifact and let ``write`` write it; ``force`` is None for a directory."""
    place = home()
    store = Store(place.store)
    loaded = open_artifact(store, artifact)
    path = output or Path(loaded.config.name.rpartition("/")[2] + suffix)
    if force is not None:
        refuse_existing(path, force=force)
    with render.progress(progress) as emit, store.lease():
        verify_local(store, artifact, trusted_keys(place, ()))
        started = time.monotonic()
        emit(PhaseStarted(phase="export", text=f"writing {path}"))
        files = materialise(store, loaded, place.materialised, emit=emit)
        write(loaded, files, path, emit)
        seconds = time.monotonic() - started
        emit(PhaseFinished(phase="export", text=f"wrote {path}", seconds=seconds))
    if as_json:
        digest = loaded.index.descriptor.digest
        print_json({"form": form, "artifact": artifact, "digest": digest, "path": str(path)})
    else:
        click.echo(path)


def _image_name(artifact: str, loaded: Artifact, asked: str | None) -> str:
    """Return repository and tag of the image: as asked, as the artifact was called, or its name."""
    called = asked or (loaded.config.name if artifact.startswith("sha256:") else artifact)
    repository, colon, tag = called.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = called, "latest"
    return f"{repository}:{tag}"
