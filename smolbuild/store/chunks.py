"""Cut raw files into zstd chunks of the store, and put them together again, sparse and verified."""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes
from smolbuild.core.errors import VerificationError
from smolbuild.core.files import data_extents
from smolbuild.model.artifact import Chunk, PackedBlob, Stream
from smolbuild.model.oci import Descriptor, describe
from smolbuild.store.layout import Store

__all__ = ["LayerSet", "data_ranges", "pack_blob", "pack_stream", "unpack_blob", "unpack_stream"]

ZSTD_LEVEL = 3
_SPARSE = 64 * 1024
_ZEROS = bytes(16 * 1024 * 1024)
_PACK_THREADS = 4
"""More than cores: each blob is fsynced, and meanwhile another is compressed."""
_UNPACK_THREADS = 2


class LayerSet:
    """The layers of a manifest in the making: equal blobs share one layer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[Digest, int] = {}
        self.descriptors: list[Descriptor] = []

    def place(self, descriptor: Descriptor) -> int:
        """Return the layer index of ``descriptor``, adding it when it is new."""
        with self._lock:
            place = self._places.get(descriptor.digest)
            if place is None:
                place = self._places[descriptor.digest] = len(self.descriptors)
                self.descriptors.append(descriptor)
            return place


def data_ranges(path: Path) -> Iterator[tuple[int, int]]:
    """Yield ``(offset, length)`` of the parts of a sparse file that may hold data."""
    with path.open("rb") as stream:
        for start, end in data_extents(stream.fileno()):
            yield start, end - start


def pack_stream(
    store: Store,
    layers: LayerSet,
    *,
    size: int,
    chunk_size: int,
    read: Callable[[int, int], bytes],
    present: Iterable[int],
    media_type: str,
    progress: Callable[[int], None] = lambda _: None,
) -> Stream:
    """Compress a raw stream into chunks of ``store`` and return its chunk map.

    Args:
        store: where the chunk blobs go.
        layers: the manifest's layers, to which the chunks are added in stream order.
        size: raw bytes of the stream.
        chunk_size: raw bytes of each chunk but the last.
        read: returns the raw bytes of ``(offset, length)``; called from several threads.
        present: numbers of the chunks that may hold data; all others are holes.
        media_type: of the chunk blobs.
        progress: called with the raw bytes of each finished chunk.

    """
    wanted = sorted(set(present))

    def pack(number: int) -> tuple[Digest, Descriptor] | None:
        offset = number * chunk_size
        data = read(offset, min(chunk_size, size - offset))
        progress(len(data))
        if _is_zero(data):
            return None
        blob = _compress(data)
        descriptor = describe(blob, media_type)
        if not store.has(descriptor.digest, descriptor.size):
            store.add_bytes(blob)
        return digest_bytes(data), descriptor

    with ThreadPoolExecutor(_PACK_THREADS, thread_name_prefix="pack") as pool:
        packed = dict(zip(wanted, pool.map(pack, wanted), strict=True))
    chunks = []
    for number in range(-(-size // chunk_size)):
        length = min(chunk_size, size - number * chunk_size)
        done = packed.get(number)
        if done is None:
            chunks.append(Chunk(layer=None, length=length))
        else:
            chunks.append(Chunk(layer=layers.place(done[1]), length=length, sha256=done[0]))
    return Stream(size=size, chunk_size=chunk_size, chunks=tuple(chunks))


def unpack_stream(
    store: Store,
    layers: tuple[Descriptor, ...],
    stream: Stream,
    write: Callable[[int, memoryview], None],
    media_type: str,
) -> None:
    """Decompress ``stream`` and hand its non-zero parts to ``write(offset, bytes)``, all verified.

    ``write`` is called from several threads, for disjoint ranges; what it does not receive is zero.

    Raises:
        VerificationError: a layer is missing, of the wrong type, damaged, or not what the map says.

    """

    def unpack(item: tuple[int, Chunk]) -> None:
        number, chunk = item
        data = read_chunk(store, layers, chunk, media_type)
        offset = number * stream.chunk_size
        view = memoryview(data)
        for start in range(0, len(data), _SPARSE):
            piece = view[start : start + _SPARSE]
            if piece != _ZEROS[: len(piece)]:
                write(offset + start, piece)

    work = [(n, chunk) for n, chunk in enumerate(stream.chunks) if chunk.layer is not None]
    with ThreadPoolExecutor(_UNPACK_THREADS, thread_name_prefix="unpack") as pool:
        for _ in pool.map(unpack, work):
            pass


def read_chunk(
    store: Store, layers: tuple[Descriptor, ...], chunk: Chunk, media_type: str
) -> bytes:
    """Return the verified raw bytes of one chunk that is not a hole.

    Raises:
        VerificationError: as ``unpack_stream``.

    """
    if chunk.layer is None or chunk.sha256 is None:
        return bytes(chunk.length)
    data = _decompress(store, _layer(layers, chunk.layer, media_type), chunk.length)
    if digest_bytes(data) != chunk.sha256:
        raise VerificationError(f"a chunk's content is not what its map says: {chunk.sha256}")
    return data


def pack_blob(
    store: Store, layers: LayerSet, data: bytes, media_type: str, *, compress: bool
) -> PackedBlob:
    """Store a whole file as one layer, compressed or as it is."""
    blob = _compress(data) if compress else data
    store.add_bytes(blob)
    return PackedBlob(
        layer=layers.place(describe(blob, media_type)), length=len(data), sha256=digest_bytes(data)
    )


def unpack_blob(
    store: Store,
    layers: tuple[Descriptor, ...],
    blob: PackedBlob,
    media_type: str,
    *,
    compress: bool,
) -> bytes:
    """Return the verified raw bytes of a whole-file layer.

    Raises:
        VerificationError: as ``unpack_stream``.

    """
    layer = _layer(layers, blob.layer, media_type)
    if compress:
        data = _decompress(store, layer, blob.length)
    else:
        data = store.read(layer.digest, limit=blob.length)
    if len(data) != blob.length or digest_bytes(data) != blob.sha256:
        raise VerificationError(f"the {media_type} layer is not what the config says")
    return data


def map_file(path: Path) -> mmap.mmap:
    """Map ``path`` read-only; slices of the map are copies of its bytes."""
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)


def _layer(layers: tuple[Descriptor, ...], place: int, media_type: str) -> Descriptor:
    if place >= len(layers):
        raise VerificationError(f"the config names layer {place}, the manifest has {len(layers)}")
    layer = layers[place]
    if layer.media_type != media_type:
        raise VerificationError(
            f"layer {place} has the media type {layer.media_type[:100]}, expected {media_type}"
        )
    return layer


def _compress(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


def _decompress(store: Store, layer: Descriptor, length: int) -> bytes:
    import zstandard

    blob = store.read(layer.digest, limit=layer.size)
    try:
        announced = zstandard.frame_content_size(blob)
        # The frame says how much it will write; believe it only when the signed map says the same.
        if announced != length:
            raise VerificationError(
                f"layer {layer.digest} announces {announced:,} raw bytes, the map says {length:,}"
            )
        return zstandard.ZstdDecompressor().decompress(
            blob, max_output_size=length, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise VerificationError(f"layer {layer.digest} is not a zstd frame: {error}") from error


def _is_zero(data: bytes) -> bool:
    return all(
        data[start : start + len(_ZEROS)] == _ZEROS[: min(len(_ZEROS), len(data) - start)]
        for start in range(0, len(data), len(_ZEROS))
    )
