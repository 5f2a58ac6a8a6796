"""The artifact config: what an environment artifact is, in one JSON document.

The config is the ``config`` blob of the artifact's image manifest. Every stream is described by raw
length and raw SHA-256 of its chunks, so that a reader checks what it decompresses, not only what it
downloads. A chunk without a layer is a hole: all zeros, not shipped.
"""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import VerificationError
from smolbuild.core.values import dataclass
from smolbuild.model.contract import Contract, Shape
from smolbuild.model.egress import StepEgress
from smolbuild.model.inside import GuestPort, GuestProcess
from smolbuild.model.oci import encode_json, parse_json_object
from smolbuild.model.smolfile import Health, Network, RestoreContract, Service

__all__ = [
    "DELTA_BLOCK",
    "FORMAT_VERSION",
    "MAX_CONFIG_BYTES",
    "ArtifactConfig",
    "BaseInfo",
    "Chunk",
    "DiskDelta",
    "DiskStreams",
    "PackedBlob",
    "Results",
    "RunConfig",
    "Stream",
    "decode_config",
    "encode_config",
]

FORMAT_VERSION = 1
DELTA_BLOCK = 64 * 1024
"""Bytes of a disk delta's blocks."""
MAX_CONFIG_BYTES = 64 * 1024 * 1024
_MAX_CHUNK = 64 * 1024 * 1024
_MAX_STREAM = 1 << 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One run of raw bytes. ``layer`` is the index in the manifest's layers; None: a hole."""

    layer: int | None
    length: int
    sha256: Digest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Raw bytes cut into chunks; all but the last are ``chunk_size`` long."""

    size: int
    chunk_size: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskDelta:
    """Blocks of the disk that differ from what lies below.

    ``blocks`` are runs ``(first block, count)`` whose content is ``data``, packed in this order;
    ``zeros`` are runs that became zero. Block numbers count ``block_size`` bytes,
    which is ``DELTA_BLOCK``.
    """

    step: str
    block_size: int
    blocks: tuple[tuple[int, int], ...]
    zeros: tuple[tuple[int, int], ...]
    data: Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStreams:
    """The disk: a base stream and deltas, lowest first."""

    base: Stream
    deltas: tuple[DiskDelta, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlob:
    """A whole file in one layer, with its raw length and digest."""

    layer: int
    length: int
    sha256: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How commands run in a fork: the image's configuration under the Smolfile's overrides."""

    env: tuple[tuple[str, str], ...]
    workdir: str
    user: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    ports: tuple[tuple[int, int], ...] = ()
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseInfo:
    """What the base's digest stands for, for people: the key holds the digest alone."""

    kind: str
    """``debian``, ``dockerfile``, or where the image was: ``image`` (a registry) or ``local``."""
    reference: str
    """The suite, the Dockerfile, or the image as the Smolfile names it."""
    digest: Digest
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions by name, where the lock knows them."""

    def __str__(self) -> str:
        """Return how a person names it."""
        return f"{self.kind} {self.reference}" if self.kind == "debian" else self.reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was seen before the checkpoint. The restore proof is attested: it comes after it."""

    health: str
    """What the passed health check saw; empty when none is declared."""
    ready_ms: Mapping[str, int]
    """Milliseconds from a service's start to its passed readiness probe, by service."""
    egress: tuple[StepEgress, ...] = ()
    """What each step, and then the services, asked of the network, in this order."""
    processes: tuple[GuestProcess, ...] = ()
    """What runs in the checkpoint."""
    ports: tuple[GuestPort, ...] = ()
    """Where it listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactConfig:
    """Everything a worker must know to restore, cold-boot and judge an artifact."""

    format_version: int
    name: str
    key: Digest
    key_tree: Mapping[str, Any]
    created: str
    """RFC 3339, UTC."""
    os: str
    shape: Shape
    contract: Contract
    agent_cursor: str
    """Base64 of what the host side needs to go on with the agent's open session."""
    disk: DiskStreams
    memory: Stream
    device_state: PackedBlob
    kernel: PackedBlob
    initrd: PackedBlob
    run: RunConfig
    network: Network
    services: tuple[Service, ...]
    health: Health | None
    restore: RestoreContract
    results: Results
    base: BaseInfo | None = None
    kernel_version: str = ""
    """Of the kernel's package; empty: the user's own kernel."""
    builder_version: str = ""
    """Of the smolbuild that built it."""


def encode_config(config: ArtifactConfig) -> bytes:
    """Return the JSON bytes of ``config``; ``decode_config`` of them gives an equal value."""
    return encode_json(encode(config))


def decode_config(data: bytes) -> ArtifactConfig:
    """Parse and check a config blob.

    Raises:
        VerificationError: unknown format version, malformed, or chunk maps that do not add up.

    """
    value = parse_json_object(data, "artifact config", limit=MAX_CONFIG_BYTES)
    version = value.get("formatVersion")
    if version != FORMAT_VERSION:
        raise VerificationError(
            f"the artifact has format version {json.dumps(version)[:40]}, "
            f"this smolbuild reads version {FORMAT_VERSION}",
            hint="use a newer smolbuild",
            code="format-version",
        )
    config = decode(ArtifactConfig, value, "artifact config")
    _check_streams(config)
    return config


def _check_streams(config: ArtifactConfig) -> None:
    _check_stream(config.disk.base, "disk base")
    if config.disk.base.size != config.shape.disk_bytes:
        _bad("disk base", "its size is not the machine's disk size")
    for delta in config.disk.deltas:
        _check_delta(delta, config.disk.base.size)
    _check_stream(config.memory, "memory")
    if config.memory.size != config.shape.memory_mib << 20:
        _bad("memory", "its size is not the machine's memory size")
    for name in ("device_state", "kernel", "initrd"):
        blob: PackedBlob = getattr(config, name)
        if not 0 <= blob.length <= (1 << 31) or blob.layer < 0:
            _bad(name, "length or layer is out of range")
        _check_digest(blob.sha256, name)
    _check_digest(config.key, "key")


def _check_delta(delta: DiskDelta, disk_bytes: int) -> None:
    what = f"disk delta {delta.step!r}"
    _check_stream(delta.data, what)
    if delta.block_size != DELTA_BLOCK:
        _bad(what, f"its block size is not {DELTA_BLOCK}")
    for first, count in (*delta.blocks, *delta.zeros):
        if (
            first < 0
            or count <= 0
            or (first + count) * delta.block_size > disk_bytes + delta.block_size - 1
        ):
            _bad(what, "a block run lies outside the disk")
    if sum(count for _, count in delta.blocks) * delta.block_size != delta.data.size:
        _bad(what, "its block map and its data differ in size")


def _check_stream(stream: Stream, what: str) -> None:
    if not 0 <= stream.size <= _MAX_STREAM or not 4096 <= stream.chunk_size <= _MAX_CHUNK:
        _bad(what, "its size or chunk size is out of range")
    left = stream.size
    for chunk in stream.chunks:
        if chunk.length != min(stream.chunk_size, left) or chunk.length <= 0:
            _bad(what, "a chunk has the wrong length")
        if chunk.layer is not None:
            if chunk.layer < 0 or chunk.sha256 is None:
                _bad(what, "a chunk has no layer or digest")
            _check_digest(chunk.sha256, what)
        left -= chunk.length
    if left:
        _bad(what, "its chunks do not add up to its size")


def _check_digest(digest: Digest | None, what: str) -> None:
    try:
        parse_digest(digest or "")
    except ValueError as error:
        raise VerificationError(f"artifact config: {what}: {error}", code="malformed") from error


def _bad(what: str, problem: str) -> None:
    raise VerificationError(f"artifact config: {what}: {problem}", code="malformed")
