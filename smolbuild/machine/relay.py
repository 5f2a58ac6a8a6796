"""Moving bytes between two sockets, bounded in memory and in silence."""

import contextlib
import selectors
import socket
from dataclasses import dataclass, field

from smolbuild.core.clock import Deadline
from smolbuild.machine.egress_http import BadRequestError

__all__ = ["copy_bytes", "read_head", "relay"]

_READ = 65536
_BUFFER = 262_144


def read_head(connection: socket.socket, limit: int, deadline: Deadline) -> tuple[bytes, bytes]:
    """Read up to and with the first empty line; return it and what came after.

    The head is empty when the other end closed without a byte.

    Raises:
        BadRequestError: longer than ``limit``, later than ``deadline``, or cut short.
        OSError: the connection broke.

    """
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > limit:
            raise BadRequestError(431, f"a head of more than {limit:,} bytes")
        if deadline.passed():
            raise BadRequestError(504, "the head did not arrive in time")
        connection.settimeout(deadline.left() + 0.001)
        try:
            part = connection.recv(_READ)
        except TimeoutError:
            continue
        if not part:
            if data:
                raise BadRequestError(502, "the connection closed in the middle of a head")
            return b"", b""
        data += part
    return bytes(data[: end + 4]), bytes(data[end + 4 :])


def copy_bytes(
    source: socket.socket, target: socket.socket, *, first: bytes, length: int | None, idle: float
) -> int:
    """Send ``first`` and then what ``source`` gives to ``target``; return the number of bytes.

    Args:
        source: read from.
        target: written to.
        first: bytes already read from ``source``.
        length: exactly so many bytes in all, less only if ``source`` ends; None: until it ends.
        idle: seconds without progress after which it fails.

    Raises:
        OSError: a connection broke or was silent for too long.

    """
    source.settimeout(idle)
    target.settimeout(idle)
    done = 0
    part = first if length is None else first[:length]
    while True:
        if part:
            target.sendall(part)
            done += len(part)
        if length is not None and done >= length:
            return done
        part = source.recv(_READ if length is None else min(_READ, length - done))
        if not part:
            return done


@dataclass(slots=True, kw_only=True)
class _Direction:
    source: socket.socket
    target: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    count: int = 0
    ended: bool = False
    done: bool = False

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self.source.recv(_READ)
            self.pending += data
            self.count += len(data)
            self.ended = not data

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.pending:
                del self.pending[: self.target.send(self.pending)]
        if self.ended and not self.pending and not self.done:
            self.done = True
            with contextlib.suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)

    def wants_read(self) -> bool:
        return not self.ended and len(self.pending) < _BUFFER


def relay(
    one: socket.socket, other: socket.socket, *, first: bytes, idle: float
) -> tuple[int, int]:
    """Carry bytes both ways until both ends closed, or ``idle`` seconds passed without any.

    ``first`` are bytes already read from ``one``. Returns how many came from each.
    """
    one.setblocking(False)
    other.setblocking(False)
    there = _Direction(source=one, target=other, pending=bytearray(first), count=len(first))
    back = _Direction(source=other, target=one)
    with selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
        there.send()
        while not (there.done and back.done):
            _watch(selector, one, reads=there.wants_read(), writes=bool(back.pending))
            _watch(selector, other, reads=back.wants_read(), writes=bool(there.pending))
            if not selector.get_map():
                break
            ready = selector.select(idle)
            if not ready:
                break
            for key, events in ready:
                mine, its = (there, back) if key.fileobj is one else (back, there)
                if events & selectors.EVENT_READ:
                    mine.receive()
                if events & selectors.EVENT_WRITE:
                    its.send()
                mine.send()
    return there.count, back.count


def _watch(
    selector: selectors.BaseSelector, sock: socket.socket, *, reads: bool, writes: bool
) -> None:
    events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
    watched = sock in selector.get_map()
    if events and watched:
        selector.modify(sock, events)
    elif events:
        selector.register(sock, events)
    elif watched:
        selector.unregister(sock)
