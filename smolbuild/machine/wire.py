"""The bytes of the agent protocol: frames and the fields inside their payloads.

Described in ``docs/agent-protocol.md``; the other end is ``guest/port.c``. The guest is not
trusted: every length is checked before it is used, and what does not fit is a ``MachineError``.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from smolbuild.core.errors import MachineError

__all__ = [
    "MAX_DATA",
    "MAX_PAYLOAD",
    "PROTOCOL_VERSION",
    "WINDOW",
    "Channel",
    "Code",
    "Fields",
    "Frame",
    "FrameReader",
    "FrameType",
    "Op",
    "encode_frame",
    "flag",
    "lines",
    "text",
    "u8",
    "u32",
    "u64",
]

PROTOCOL_VERSION = 1
MAX_PAYLOAD = 256 * 1024
"""Bytes that no payload exceeds, in either direction."""
MAX_DATA = 16 * 1024
"""Bytes that one DATA frame of ours carries at most."""
WINDOW = 256 * 1024
"""DATA bytes per stream and direction that may be on their way before a CREDIT."""

_MAGIC = 0x4253
_HEADER = struct.Struct("<HBBIII")


class FrameType(IntEnum):
    """What a frame is for."""

    HELLO = 1
    REQUEST = 2
    DATA = 3
    EOF = 4
    CREDIT = 5
    RESET = 6
    RESULT = 7
    OPEN = 8
    FAULT = 9


class Op(IntEnum):
    """The operation that a REQUEST asks for: the first byte of its payload."""

    PING = 1
    EXEC = 2
    KILL = 3
    STATUS = 4
    OUTPUT = 5
    PUT = 6
    GET = 7
    PROBE = 8
    FRESHEN = 9
    IDENTITY = 10
    FREEZE = 11
    THAW = 12
    SYNC = 13
    QUIESCE = 14
    TUNNELS = 15
    SHUTDOWN = 16
    RESIZE = 17
    SECRETS = 32
    ZERO_FREE = 33
    SURVEY = 48


class Code(IntEnum):
    """How a request ended: the first field of a RESULT."""

    OK = 0
    BAD_REQUEST = 1
    UNKNOWN = 2
    BUSY = 3
    SYSTEM = 4
    DEADLINE = 5
    NOT_A_GUEST = 6
    LIMIT = 7


class Channel(IntEnum):
    """Which of a stream's byte sequences a DATA frame belongs to."""

    IN = 0
    OUT = 1
    ERR = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; ``epoch`` is the life of the machine it was sent in."""

    type: FrameType
    channel: int
    epoch: int
    stream: int
    payload: bytes


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of ``frame``.

    Raises:
        ValueError: the payload is larger than ``MAX_PAYLOAD``.

    """
    if len(frame.payload) > MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(frame.payload):,} bytes is too large for a frame")
    header = _HEADER.pack(
        _MAGIC, frame.type, frame.channel, frame.epoch, frame.stream, len(frame.payload)
    )
    return header + frame.payload


class FrameReader:
    """Cuts a byte stream into frames, keeping no more than one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes.

        Raises:
            MachineError: the bytes are no frames; nothing after them can be trusted.

        """
        self._buffer += data
        used = 0
        try:
            while len(self._buffer) - used >= _HEADER.size:
                magic, kind, channel, epoch, stream, size = _HEADER.unpack_from(self._buffer, used)
                if magic != _MAGIC or size > MAX_PAYLOAD or kind not in _KINDS:
                    raise MachineError("the guest agent sent bytes that are no frame", code=_CODE)
                end = used + _HEADER.size + size
                if len(self._buffer) < end:
                    return
                payload = bytes(memoryview(self._buffer)[used + _HEADER.size : end])
                used = end
                yield Frame(FrameType(kind), channel, epoch, stream, payload)
        finally:
            del self._buffer[:used]


class Fields:
    """Reads the fields of a payload in order."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def raw(self, size: int) -> bytes:
        """Return the next ``size`` bytes.

        Raises:
            MachineError: the payload is shorter.

        """
        if size > len(self._payload) - self._at:
            raise MachineError("the guest agent sent a truncated answer", code=_CODE)
        self._at += size
        return self._payload[self._at - size : self._at]

    def u8(self) -> int:
        """Return the next byte."""
        return self.raw(1)[0]

    def u32(self) -> int:
        """Return the next 32-bit number."""
        return int.from_bytes(self.raw(4), "little")

    def i32(self) -> int:
        """Return the next signed 32-bit number."""
        return int.from_bytes(self.raw(4), "little", signed=True)

    def u64(self) -> int:
        """Return the next 64-bit number."""
        return int.from_bytes(self.raw(8), "little")

    def text(self) -> str:
        """Return the next text; bytes that are no UTF-8 are replaced."""
        return self.raw(self.u32()).decode(errors="replace")


def u8(value: int) -> bytes:
    """Return the field of a byte."""
    return value.to_bytes(1, "little")


def flag(value: bool) -> bytes:
    """Return the field of a truth value."""
    return u8(int(value))


def u32(value: int) -> bytes:
    """Return the field of a 32-bit number."""
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    """Return the field of a 64-bit number."""
    return value.to_bytes(8, "little")


def text(value: str) -> bytes:
    """Return the field of a text. File names that are no UTF-8 pass as ``surrogateescape``.

    Raises:
        MachineError: it holds a NUL, which no argument, name or path in the guest can.

    """
    data = value.encode(errors="surrogateescape")
    if b"\0" in data:
        raise MachineError(f"a NUL byte cannot be passed to the guest: {value[:60]!r}")
    return u32(len(data)) + data


def lines(values: tuple[str, ...]) -> bytes:
    """Return the field of a list of texts."""
    return u32(len(values)) + b"".join(text(value) for value in values)


_CODE = "agent-protocol"
_KINDS = frozenset(FrameType)
