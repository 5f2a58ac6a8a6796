import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import VerificationError
from smolbuild.model.artifact import Stream
from smolbuild.model.oci import DISK_CHUNK_TYPE
from smolbuild.store.chunks import (
    LayerSet,
    data_ranges,
    pack_blob,
    pack_stream,
    unpack_blob,
    unpack_stream,
)
from smolbuild.store.layout import Store

CHUNK = 256 * 1024


def pack(store, data, present=None):
    layers = LayerSet()
    stream = pack_stream(
        store,
        layers,
        size=len(data),
        chunk_size=CHUNK,
        read=lambda offset, length: data[offset : offset + length],
        present=range(-(-len(data) // CHUNK)) if present is None else present,
        media_type=DISK_CHUNK_TYPE,
    )
    return stream, tuple(layers.descriptors)


def unpack(store, stream: Stream, layers):
    out = bytearray(stream.size)

    def write(offset, piece):
        out[offset : offset + len(piece)] = piece

    unpack_stream(store, layers, stream, write, DISK_CHUNK_TYPE)
    return bytes(out)


parts = st.lists(
    st.tuples(st.sampled_from([b"\0", b"a", b"b"]), st.integers(1, CHUNK)), min_size=1, max_size=8
)


@settings(max_examples=25, deadline=None)
@given(parts)
def test_round_trip(tmp_path_factory, pieces):
    data = b"".join(byte * length for byte, length in pieces)
    store = Store(tmp_path_factory.mktemp("store"))
    stream, layers = pack(store, data)
    assert unpack(store, stream, layers) == data
    assert len(layers) <= len(stream.chunks)


def test_zero_chunks_are_holes_and_equal_chunks_share_a_layer(tmp_path):
    store = Store(tmp_path)
    block = os.urandom(CHUNK)
    stream, layers = pack(store, block + bytes(CHUNK) + block + b"end")
    assert [chunk.layer for chunk in stream.chunks] == [0, None, 0, 1]
    assert len(layers) == 2


def test_absent_chunks_are_not_read(tmp_path):
    stream, _ = pack(Store(tmp_path), b"x" * CHUNK * 2, present=[1])
    assert [chunk.layer for chunk in stream.chunks] == [None, 0]


def test_a_damaged_swapped_or_mistyped_layer_is_refused(tmp_path):
    store = Store(tmp_path)
    stream, layers = pack(store, os.urandom(CHUNK) + os.urandom(CHUNK))
    with pytest.raises(VerificationError, match="not what its map says"):
        unpack(store, stream, layers[::-1])
    with pytest.raises(VerificationError, match="names layer 1"):
        unpack(store, stream, layers[:1])
    with pytest.raises(VerificationError, match="media type"):
        unpack_stream(store, layers, stream, lambda *_: None, "text/plain")
    blob = store.path(layers[0].digest)
    raw = bytearray(blob.read_bytes())
    raw[100] ^= 1
    blob.write_bytes(raw)
    with pytest.raises(VerificationError, match="damaged"):
        unpack(store, stream, layers)


def test_a_frame_that_announces_more_than_the_map_says_is_not_decompressed(tmp_path):
    store = Store(tmp_path)
    layers = LayerSet()
    blob = pack_blob(store, layers, b"a" * 10_000_000, DISK_CHUNK_TYPE, compress=True)
    small = type(blob)(layer=0, length=10, sha256=blob.sha256)
    with pytest.raises(VerificationError, match="announces 10,000,000"):
        unpack_blob(store, tuple(layers.descriptors), small, DISK_CHUNK_TYPE, compress=True)


@pytest.mark.parametrize("compress", [True, False])
def test_whole_blobs_round_trip(tmp_path, compress):
    store = Store(tmp_path)
    layers = LayerSet()
    blob = pack_blob(store, layers, b"kernel", DISK_CHUNK_TYPE, compress=compress)
    assert (
        unpack_blob(store, tuple(layers.descriptors), blob, DISK_CHUNK_TYPE, compress=compress)
        == b"kernel"
    )


def test_data_ranges_cover_all_data(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        stream.truncate(8 << 20)
        stream.seek(3 << 20)
        stream.write(b"x" * 100)
    ranges = list(data_ranges(path))
    assert any(start <= 3 << 20 < start + length for start, length in ranges)
    assert sum(length for _, length in ranges) < 1 << 20
