"""Pack a checkpoint and its disk chain into an artifact of the local store."""

import base64
import bisect
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.core.events import Emit, Transfer
from smolbuild.core.files import private_directory, write_atomic
from smolbuild.machine.base import Checkpoint
from smolbuild.model.artifact import (
    DELTA_BLOCK,
    ArtifactConfig,
    DiskDelta,
    DiskStreams,
    PackedBlob,
    Stream,
    encode_config,
)
from smolbuild.model.oci import (
    ARTIFACT_TYPE,
    CONFIG_TYPE,
    DEVICE_STATE_TYPE,
    DISK_CHUNK_TYPE,
    INDEX_TYPE,
    INITRD_TYPE,
    KERNEL_TYPE,
    MANIFEST_TYPE,
    MEMORY_CHUNK_TYPE,
    Descriptor,
    describe,
    encode_json,
    parse_json_object,
)
from smolbuild.store.artifact import Artifact, load_artifact
from smolbuild.store.chunks import LayerSet, data_ranges, map_file, pack_blob, pack_stream
from smolbuild.store.layout import Store
from smolbuild.store.qcow2 import Extent, clusters
from smolbuild.store.shadow import without_shadowed

__all__ = ["Delta", "Overlay", "Streams", "pack_artifact", "pack_streams", "shipped_deltas"]

DISK_CHUNK = 4 * 1024 * 1024
MEMORY_CHUNK = 16 * 1024 * 1024
_GOARCH = {"x86_64": "amd64", "aarch64": "arm64"}
"""OCI names architectures as Go does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The packed parts of a machine and the layers they lie in."""

    layers: tuple[Descriptor, ...]
    disk: DiskStreams
    memory: Stream
    device_state: PackedBlob
    kernel: PackedBlob
    initrd: PackedBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A step's finished overlay (qcow2)."""

    step: str
    path: Path
    note: Path | None = None
    """Where its packed form is remembered; None: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What of a step's overlay goes into the artifact."""

    step: str
    overlay: Path
    """A finished qcow2 file."""
    extents: tuple[Extent, ...]
    note: Path | None = None
    """Where the packed form is remembered; None: nowhere, or not the whole overlay ships."""


def shipped_deltas(overlays: Sequence[Overlay], *, only_seen: bool) -> tuple[Delta, ...]:
    """Return what of the overlays, lowest first, is shipped.

    With ``only_seen`` what a later overlay replaces is left out: nobody can read it any more, so
    what was deleted is gone. Without, a delta does not depend on later steps, and two versions
    share more of them.
    """
    held = [tuple(clusters(overlay.path)) for overlay in overlays]
    shown = without_shadowed(held) if only_seen else held
    return tuple(
        Delta(
            step=overlay.step,
            overlay=overlay.path,
            extents=extents,
            note=None if only_seen else overlay.note,
        )
        for overlay, extents in zip(overlays, shown, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """What is remembered of a packed base disk or delta, so that it is compressed only once."""

    stream: Stream
    layers: tuple[Descriptor, ...]


def pack_streams(
    store: Store,
    *,
    base: Path,
    base_digest: Digest,
    deltas: Sequence[Delta],
    checkpoint: Checkpoint,
    kernel: Path,
    initrd: Path,
    cache: Path,
    emit: Emit,
) -> Streams:
    """Compress disk, memory, device state, kernel and initrd into blobs of ``store``.

    Args:
        store: receives the blobs; hold a lease on it.
        base: the raw base disk.
        base_digest: digest that identifies the base disk's content.
        deltas: what of each overlay is shipped, lowest first, the checkpoint's own one last.
        checkpoint: memory and device state.
        kernel: kernel image.
        initrd: initramfs.
        cache: ``Home.cache``; remembers the chunk map of packed base disks.
        emit: receives ``Transfer`` events in raw bytes.

    """
    layers = LayerSet()
    disk = DiskStreams(
        base=_pack_base(store, layers, base, base_digest, cache, emit),
        deltas=tuple(_pack_delta(store, layers, delta) for delta in deltas),
    )
    memory = _pack_file(store, layers, checkpoint.memory, MEMORY_CHUNK, MEMORY_CHUNK_TYPE, emit)
    state = pack_blob(
        store, layers, checkpoint.state.read_bytes(), DEVICE_STATE_TYPE, compress=True
    )
    return Streams(
        disk=disk,
        memory=memory,
        device_state=state,
        kernel=pack_blob(store, layers, kernel.read_bytes(), KERNEL_TYPE, compress=False),
        initrd=pack_blob(store, layers, initrd.read_bytes(), INITRD_TYPE, compress=False),
        layers=tuple(layers.descriptors),
    )


def pack_artifact(store: Store, config: ArtifactConfig, layers: tuple[Descriptor, ...]) -> Artifact:
    """Write config, machine manifest and index for streams that are in ``store`` already.

    Nothing names the result yet. The same config gives the same digests.
    """
    config_bytes = encode_config(config)
    store.add_bytes(config_bytes)
    annotations = {
        "org.opencontainers.image.created": config.created,
        "org.opencontainers.image.title": config.name,
    }
    manifest = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": describe(config_bytes, CONFIG_TYPE).to_json(),
            "layers": [layer.to_json() for layer in layers],
            "annotations": annotations,
        }
    )
    store.add_bytes(manifest)
    contract = config.contract
    child = dataclasses.replace(
        describe(manifest, MANIFEST_TYPE),
        platform={
            "architecture": _GOARCH.get(contract.architecture, contract.architecture),
            "os": config.os,
        },
        annotations={
            "com.smolbuild.contract": json.dumps(
                encode(contract), separators=(",", ":"), sort_keys=True
            ),
        },
    )
    index = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [child.to_json()],
            "annotations": {"com.smolbuild.key": config.key, **annotations},
        }
    )
    store.add_bytes(index)
    return load_artifact(store, describe(index, INDEX_TYPE))


def encode_agent_cursor(cursor: bytes) -> str:
    """Return the agent session's cursor as it stands in the config."""
    return base64.b64encode(cursor).decode()


def _pack_base(
    store: Store, layers: LayerSet, base: Path, digest: Digest, cache: Path, emit: Emit
) -> Stream:
    note = private_directory(cache / "streams") / f"{hex_of(digest)}.json"
    return _pack_once(
        store,
        layers,
        note,
        lambda own: _pack_file(store, own, base, DISK_CHUNK, DISK_CHUNK_TYPE, emit),
    )


def _pack_once(
    store: Store, layers: LayerSet, note: Path, pack: Callable[[LayerSet], Stream]
) -> Stream:
    """Return the packed stream that ``note`` remembers, or pack it and remember it there."""
    packed = _remembered(store, note)
    if packed is None:
        own = LayerSet()
        packed = _Packed(stream=pack(own), layers=tuple(own.descriptors))
        with contextlib.suppress(FileNotFoundError):  # the entry it belongs to was evicted
            write_atomic(note, encode_json(encode(packed)))
    places = [layers.place(layer) for layer in packed.layers]
    chunks = tuple(
        chunk if chunk.layer is None else dataclasses.replace(chunk, layer=places[chunk.layer])
        for chunk in packed.stream.chunks
    )
    return dataclasses.replace(packed.stream, chunks=chunks)


def _remembered(store: Store, note: Path) -> _Packed | None:
    try:
        value = parse_json_object(note.read_bytes(), str(note), limit=1 << 26)
        packed = decode(_Packed, value, str(note))
    except (FileNotFoundError, VerificationError):
        return None
    if all(store.has(layer.digest, layer.size) for layer in packed.layers):
        return packed
    return None


def _pack_file(
    store: Store, layers: LayerSet, path: Path, chunk_size: int, media_type: str, emit: Emit
) -> Stream:
    present: set[int] = set()
    for offset, length in data_ranges(path):
        present.update(range(offset // chunk_size, (offset + length - 1) // chunk_size + 1))
    done = 0

    def progress(length: int) -> None:
        nonlocal done
        done += length
        emit(Transfer(what=f"pack {path.name}", done=done, total=len(present) * chunk_size))

    raw = map_file(path)
    try:
        return pack_stream(
            store,
            layers,
            size=len(raw),
            chunk_size=chunk_size,
            read=lambda offset, length: raw[offset : offset + length],
            present=present,
            media_type=media_type,
            progress=progress,
        )
    finally:
        raw.close()


def _pack_delta(store: Store, layers: LayerSet, delta: Delta) -> DiskDelta:
    def pack(own: LayerSet) -> Stream:
        return _pack_extents(store, own, delta.overlay, delta.extents)

    packed = pack(layers) if delta.note is None else _pack_once(store, layers, delta.note, pack)
    return DiskDelta(
        step=delta.step,
        block_size=DELTA_BLOCK,
        blocks=_runs(delta.extents, "data"),
        zeros=_runs(delta.extents, "zero"),
        data=packed,
    )


def _pack_extents(
    store: Store, layers: LayerSet, overlay: Path, extents: Sequence[Extent]
) -> Stream:
    data = [extent for extent in extents if extent.kind == "data"]
    starts, position = [], 0
    for extent in data:
        starts.append(position)
        position += extent.length
    descriptor = os.open(overlay, os.O_RDONLY | os.O_CLOEXEC)

    def read(offset: int, length: int) -> bytes:
        parts = []
        while length:
            place = bisect.bisect_right(starts, offset) - 1
            inside = offset - starts[place]
            part = os.pread(
                descriptor,
                min(length, data[place].length - inside),
                data[place].host_offset + inside,
            )
            # The last cluster of a qcow2 file may end before its cluster does: the rest is zero.
            wanted = min(length, data[place].length - inside)
            part = part.ljust(wanted, b"\0")
            parts.append(part)
            offset, length = offset + wanted, length - wanted
        return b"".join(parts)

    try:
        return pack_stream(
            store,
            layers,
            size=position,
            chunk_size=DISK_CHUNK,
            read=read,
            present=range(-(-position // DISK_CHUNK)),
            media_type=DISK_CHUNK_TYPE,
        )
    finally:
        os.close(descriptor)


def _runs(extents: Sequence[Extent], kind: str) -> tuple[tuple[int, int], ...]:
    return tuple(
        (extent.guest_offset // DELTA_BLOCK, extent.length // DELTA_BLOCK)
        for extent in extents
        if extent.kind == kind
    )
