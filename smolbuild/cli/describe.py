"""Values as people and programs read them: tables, sizes, JSON of artifacts."""

from collections.abc import Sequence

import click

from smolbuild.core.codec import encode
from smolbuild.core.text import visible
from smolbuild.model.artifact import Chunk
from smolbuild.model.inside import GuestPort, GuestProcess
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import Store

__all__ = [
    "describe_artifact",
    "packed_bytes",
    "port_line",
    "print_table",
    "process_line",
    "short",
    "sizes_of",
]


def short(digest: str) -> str:
    """Return the first 12 hex digits of a digest."""
    return digest.removeprefix("sha256:")[:12]


def packed_bytes(artifact: Artifact) -> int:
    """Return the bytes of all blobs of the machine, as they are pushed."""
    return artifact.manifest.config.size + sum(layer.size for layer in artifact.manifest.layers)


def sizes_of(artifact: Artifact) -> dict[str, int]:
    """Return raw and packed sizes in bytes: disk and memory count only what is not a hole."""
    config = artifact.config

    def raw(*chunks: Chunk) -> int:
        return sum(chunk.length for chunk in chunks if chunk.layer is not None)

    deltas = [chunk for delta in config.disk.deltas for chunk in delta.data.chunks]
    return {
        "disk": raw(*config.disk.base.chunks, *deltas),
        "memory": raw(*config.memory.chunks),
        "packed": packed_bytes(artifact),
    }


def describe_artifact(store: Store, artifact: Artifact) -> dict[str, object]:
    """Return the JSON of ``smolbuild inspect``."""
    config = artifact.config
    return {
        "digest": artifact.index.descriptor.digest,
        "manifest": artifact.manifest.descriptor.digest,
        "name": config.name,
        "key": config.key,
        "created": config.created,
        "sizes": sizes_of(artifact),
        "shape": encode(config.shape),
        "contract": encode(config.contract),
        "network": encode(config.network),
        "run": encode(config.run),
        "services": encode(config.services),
        "health": encode(config)["health"],
        "restore": encode(config.restore),
        "results": encode(config.results),
        "base": encode(config.base),
        "kernelVersion": config.kernel_version,
        "builderVersion": config.builder_version,
        "keyTree": dict(config.key_tree),
        "referrers": [
            {"subject": subject, "artifactType": entry.artifact_type, "digest": entry.digest}
            for subject in (artifact.index.descriptor.digest, artifact.manifest.descriptor.digest)
            for entry in store.referrers(subject)
        ],
    }


def process_line(process: GuestProcess) -> str:
    """Return a process of a checkpoint as one line."""
    times = f" ({process.count} of them)" if process.count > 1 else ""
    service = f" [{process.service}]" if process.service else ""
    return f"{process.user} {' '.join(process.argv)}{service}{times}"


def port_line(port: GuestPort) -> str:
    """Return a listening port of a checkpoint as one line."""
    address = f"[{port.address}]" if ":" in port.address else port.address
    return f"{port.protocol} {address}:{port.port} {port.process or 'nobody known'}"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns; the first is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(visible("  ".join(cells).rstrip()))
