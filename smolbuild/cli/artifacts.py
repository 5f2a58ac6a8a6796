"""``smolbuild ls``, ``inspect`` and ``rm``."""

from collections.abc import Iterator

import click

from smolbuild.cli.describe import (
    describe_artifact,
    packed_bytes,
    port_line,
    print_table,
    process_line,
    short,
)
from smolbuild.cli.options import home, json_option, print_json
from smolbuild.core.codec import encode
from smolbuild.core.errors import VerificationError
from smolbuild.core.home import Home
from smolbuild.core.text import counted, visible
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.model.oci import Descriptor
from smolbuild.store.artifact import Artifact, load_artifact, open_artifact
from smolbuild.store.layout import Store, is_internal
from smolbuild.store.materialise import materialised_directory
from smolbuild.store.remove import remove_names

__all__ = ["inspect", "ls", "rm"]

_NO_NAME = "-"


@click.command(epilog="Example:  smolbuild ls --json")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Also what no name stands for any more."
)
@json_option
def ls(*, everything: bool, as_json: bool) -> None:
    """List the artifacts of the local store."""
    place = home()
    store = Store(place.store)
    rows = [_row(place, store, name, entry) for name, entry in _listed(store, everything)]
    if as_json:
        print_json({"artifacts": rows})
        return
    if not rows:
        click.echo("no artifacts yet; build one with `smolbuild build`", err=True)
        return
    table = [("NAME", "DIGEST", "CREATED", "SIZE")]
    for row in rows:
        if "damaged" in row:
            table.append((str(row["name"]), short(str(row["digest"])), "damaged", "-"))
        else:
            size = f"{int(str(row['packedBytes'])) / 1e6:.1f} MB"
            table.append((str(row["name"]), short(str(row["digest"])), str(row["created"]), size))
    print_table(table)


def _listed(store: Store, everything: bool) -> Iterator[tuple[str, Descriptor]]:
    names = store.names()
    named = {entry.digest for name, entry in names.items() if not is_internal(name)}
    for name, entry in names.items():
        if not is_internal(name):
            yield name, entry
        elif everything and name.startswith("key-") and entry.digest not in named:
            yield _NO_NAME, entry


def _row(place: Home, store: Store, name: str, entry: Descriptor) -> dict[str, object]:
    try:
        artifact = load_artifact(store, entry)
    except VerificationError as error:
        return {"name": name, "digest": entry.digest, "damaged": error.message}
    files = materialised_directory(place.materialised, artifact.manifest.descriptor.digest)
    return {
        "name": name,
        "digest": entry.digest,
        "key": artifact.config.key,
        "created": artifact.config.created,
        "packedBytes": packed_bytes(artifact),
        "materialised": files.is_dir(),
    }


@click.command(epilog="Example:  smolbuild inspect notes:v1 --json")
@click.argument("artifact")
@json_option
def inspect(artifact: str, *, as_json: bool) -> None:
    """Show what ARTIFACT (a name or digest) is made of."""
    store = Store(home().store)
    loaded = open_artifact(store, artifact)
    value = describe_artifact(store, loaded)
    if as_json:
        print_json(value)
        return
    for key, text in _inspect_lines(loaded, len(value["referrers"])):  # type: ignore[arg-type]
        click.echo(visible(f"{key:<10} {text}"))


def _inspect_lines(loaded: Artifact, referrers: int) -> Iterator[tuple[str, str]]:
    config = loaded.config
    yield "name", config.name
    yield "digest", loaded.index.descriptor.digest
    yield "manifest", loaded.manifest.descriptor.digest
    yield "key", config.key
    yield "created", config.created
    if config.base is not None:
        known = counted(len(config.base.packages), "package")
        more = f", {known}" if config.base.packages else ""
        yield "base", f"{config.base} ({short(config.base.digest)}{more})"
    kernel = config.kernel_version or "the user's own"
    yield "kernel", f"{kernel}; built by smolbuild {config.builder_version or 'unknown'}"
    yield "machine", _machine_line(config)
    yield "contract", ", ".join(str(part) for part in encode(config.contract).values())
    yield "services", ", ".join(service.name for service in config.services) or "none"
    yield "health", config.results.health or "none declared"
    for process in config.results.processes:
        yield "process", process_line(process)
    for port in config.results.ports:
        yield "port", port_line(port)
    yield "packed", f"{packed_bytes(loaded) / 1e6:.1f} MB in {len(loaded.manifest.layers)} blobs"
    yield "referrers", str(referrers)


@click.command(epilog="Example:  smolbuild rm notes:v1")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
def rm(names: tuple[str, ...], *, as_json: bool) -> None:
    """Remove artifacts by NAME; what no other name needs is freed.

    A digest removes every name of that artifact.
    """
    place = home()
    store = Store(place.store)
    doomed: list[str] = []
    for text in names:
        doomed.extend(_names_of(store, text))
    freed = remove_names(store, place.materialised, doomed)
    if as_json:
        print_json({"removed": doomed, "freedBytes": freed})
    else:
        for name in doomed:
            click.echo(f"removed {name}")
        click.echo(f"freed {freed / 1e6:.1f} MB")


def _names_of(store: Store, text: str) -> list[str]:
    found = store.resolve(text)
    names = store.names()
    if text in names or f"{text}:latest" in names:
        chosen = [text if text in names else f"{text}:latest"]
    else:
        every = [name for name, entry in names.items() if entry.digest == found.digest]
        chosen = [name for name in every if not is_internal(name)] or every
    return chosen


def _machine_line(config: ArtifactConfig) -> str:
    shape = config.shape
    disk = f"{shape.disk_bytes / 2**30:.0f} GiB"
    cpus = counted(shape.cpus, "cpu")
    return f"{cpus}, {shape.memory_mib} MiB, disk {disk}, network {config.network.mode}"
