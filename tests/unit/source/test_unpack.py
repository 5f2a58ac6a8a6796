"""Decompression: right, bounded, and without a file left on the host."""

import gzip
import hashlib

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_trees import region

from smolbuild.core.errors import BuildError, VerificationError
from smolbuild.source.content import verify_region
from smolbuild.source.unpack import unpacked


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@given(
    st.lists(st.binary(max_size=3000), min_size=1, max_size=4), st.sampled_from(["gzip", "zstd"])
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_members_and_frames_one_after_the_other(tmp_path, parts, form):
    compress = gzip.compress if form == "gzip" else _zstd
    data = b"".join(compress(part) for part in parts)
    with unpacked(region(data), tmp_path, what="x") as (plain, digest):
        assert b"".join(plain.chunks()) == b"".join(parts)
        assert digest == "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()
        assert list(tmp_path.iterdir()) == [], "it has a name on the host"


def test_larger_than_every_buffer(tmp_path):
    data = bytes(range(256)) * 20_000 + bytes(9 << 20)
    for packed in (gzip.compress(data, 1), gzip.compress(data) + bytes(700), _zstd(data)):
        with unpacked(region(packed), tmp_path, what="x") as (plain, digest):
            assert plain.length == len(data)
            assert digest == "sha256:" + hashlib.sha256(data).hexdigest()


def test_what_is_not_compressed_is_not_copied(tmp_path):
    with unpacked(region(b"plain tar"), tmp_path, what="x") as (plain, digest):
        assert digest is None
        assert b"".join(plain.chunks()) == b"plain tar"


@pytest.mark.parametrize("compress", [gzip.compress, _zstd])
def test_bombs_are_stopped(tmp_path, compress):
    data = compress(bytes(8 << 20))
    with (
        pytest.raises(BuildError, match=r"x unpacks to more than 1,000,000"),
        unpacked(region(data), tmp_path, what="x", limit=1_000_000),
    ):
        pass


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b"hello" * 100)[:-9],
        gzip.compress(b"hello" * 100)[:20],
        gzip.compress(b"x")[:10] + b"\xff" * 50,
        gzip.compress(b"hello")[:-8] + bytes(8),
        _zstd(b"hello" * 100)[:8] + b"\xff" * 20,
        b"\x1f\x8b",
    ],
)
def test_damaged_data_is_a_build_error(tmp_path, data):
    with (
        pytest.raises(BuildError, match="x is damaged"),
        unpacked(region(data), tmp_path, what="x"),
    ):
        pass


def test_unsupported_compressions_are_named(tmp_path):
    with (
        pytest.raises(BuildError, match="compressed with xz"),
        unpacked(region(b"\xfd7zXZ\0rest"), tmp_path, what="x"),
    ):
        pass


def test_a_wrong_digest_is_a_verification_error():
    with pytest.raises(VerificationError, match="instead of sha256:0000"):
        verify_region(region(b"x"), "sha256:" + "0" * 64, what="x")
