"""What a guest may ask of the outside, as the host's pump takes it from frames."""

import socket
import struct
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from smolbuild.machine.tunnel import Destination, TunnelPump
from smolbuild.machine.wire import Frame, FrameType


class Outside:
    def __init__(self) -> None:
        self.accepted: list[Destination | None] = []

    def accept(self, connection: socket.socket, destination: Destination | None) -> bool:
        self.accepted.append(destination)
        connection.close()
        return destination != Destination("denied", 22)

    def resolves(self, name: str) -> bool:
        return name == "good"


@pytest.fixture
def outside() -> Outside:
    return Outside()


@pytest.fixture
def sent() -> SimpleQueue[tuple[FrameType, int]]:
    return SimpleQueue()


@pytest.fixture
def pump(outside: Outside, sent: SimpleQueue[tuple[FrameType, int]]) -> Iterator[TunnelPump]:
    made = TunnelPump(lambda kind, _c, stream, _p, _d: sent.put((kind, stream)), outside)
    yield made
    made.close()


def asked(kind: int, host: bytes, number: int) -> bytes:
    return struct.pack("<BI", kind, len(host)) + host + struct.pack("<I", number)


@pytest.mark.parametrize(
    ("payload", "answer", "accepted"),
    [
        (b"", FrameType.EOF, [None]),
        (asked(1, b"192.0.2.1", 22), FrameType.EOF, [Destination("192.0.2.1", 22)]),
        (asked(1, b"denied", 22), FrameType.RESET, [Destination("denied", 22)]),
        (asked(2, b"good", 1), FrameType.EOF, []),
        (asked(2, b"bad", 1), FrameType.RESET, []),
        (asked(3, b"good", 1), FrameType.RESET, []),
        (asked(1, b"cut short", 22)[:-1], FrameType.RESET, []),
        (b"\1\xff\xff\xff\xff", FrameType.RESET, []),
        (b"\0", FrameType.RESET, []),
    ],
)
def test_each_question_is_answered(pump, sent, outside, payload, answer, accepted) -> None:
    pump.deliver(Frame(FrameType.OPEN, 0, 1, 7, payload))
    assert sent.get(timeout=10) == (answer, 7)
    assert outside.accepted == accepted
