"""The frame codec, by property."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.errors import MachineError
from smolbuild.machine.wire import (
    MAX_PAYLOAD,
    Fields,
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
    lines,
    text,
    u8,
    u32,
    u64,
)

frames = st.builds(
    Frame,
    st.sampled_from(FrameType),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=300),
)


@given(st.lists(frames, max_size=6), st.data())
def test_frames_survive_any_cut_of_the_stream(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(frame) for frame in sent)
    reader, received = FrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += reader.feed(stream[:size])
        stream = stream[size:]
    assert received == sent


@given(st.binary(max_size=400))
def test_garbage_is_an_error_or_waits_for_more(data: bytes) -> None:
    received = []
    with contextlib.suppress(MachineError):
        received += FrameReader().feed(data)
    assert sum(len(frame.payload) + 16 for frame in received) <= len(data)


def test_an_announced_length_is_not_trusted() -> None:
    header = bytearray(encode_frame(Frame(FrameType.DATA, 0, 0, 2, b"")))
    header[12:16] = (MAX_PAYLOAD + 1).to_bytes(4, "little")
    with pytest.raises(MachineError):
        list(FrameReader().feed(bytes(header)))
    with pytest.raises(ValueError, match="too large"):
        encode_frame(Frame(FrameType.DATA, 0, 0, 2, b"x" * (MAX_PAYLOAD + 1)))


@given(
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.binary(max_size=20),
)
def test_fields_come_back(a: int, b: int, c: int, d: str, e: bytes) -> None:
    fields = Fields(u8(a) + u32(b) + u64(c) + text(d) + e)
    read = (fields.u8(), fields.u32(), fields.u64(), fields.text(), fields.raw(len(e)))
    assert read == (a, b, c, d, e)
    with pytest.raises(MachineError, match="truncated"):
        fields.u8()


@given(st.binary(max_size=50))
def test_no_payload_reads_beyond_its_end(data: bytes) -> None:
    fields = Fields(data)
    with pytest.raises(MachineError, match="truncated"):
        read_all(fields)


def read_all(fields: Fields) -> None:
    while True:
        fields.text()


def test_names_that_are_no_utf8_pass_and_nul_does_not() -> None:
    assert text("a\udcff") == b"\2\0\0\0a\xff"
    assert lines(("a", "bc")) == b"\2\0\0\0" + text("a") + text("bc")
    with pytest.raises(MachineError):
        text("a\0b")
