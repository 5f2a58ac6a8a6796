"""What programs in the guest ask of the outside, pumped between sockets and streams.

One thread serves all of it. For each connection, one end of a socket pair goes to ``Outside``.
"""

import contextlib
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.wire import MAX_DATA, WINDOW, Fields, Frame, FrameType, u32

__all__ = ["Destination", "Outside", "TunnelPump"]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a connection was going, as the guest says: nothing of it is checked."""

    host: str
    port: int


class Outside(Protocol):
    """Decides on what guest programs ask for. Neither method may block."""

    def accept(self, connection: socket.socket, destination: Destination | None) -> bool:
        """Take the connection over, and close the socket in the end; None: it is for the proxy.

        False: it is refused, which the program in the guest sees as a reset.
        """

    def resolves(self, name: str) -> bool:
        """Return whether the guest may know an address for ``name``, which is not checked."""


SendFrame = Callable[[FrameType, int, int, bytes, Deadline], None]
"""Sends a frame of type, channel, stream and payload."""

_SEND_SECONDS = 30.0
_RESUME = threading.Event()
_MAX_TUNNELS = 128
_CONNECTION, _LOOKUP = 1, 2
_FRAME_COST = 64
"""What an empty frame counts in the queue: none is free."""
_MAX_QUEUED = 2 * _MAX_TUNNELS * WINDOW
"""Bytes of frames that wait for the pump; an agent that keeps to its windows stays far below."""


@dataclass(slots=True, kw_only=True)
class _Tunnel:
    stream: int
    socket: socket.socket
    credit: int = WINDOW
    pending: bytearray = field(default_factory=bytearray)
    guest_ended: bool = False
    write_done: bool = False
    read_done: bool = False


class TunnelPump:
    """Pumps all tunnels of one connection; ``deliver`` never blocks."""

    def __init__(self, send: SendFrame, outside: Outside | None) -> None:
        self._send_frame = send
        self._outside = outside
        self._frames: queue.SimpleQueue[Frame | threading.Event] = queue.SimpleQueue()
        self._queued = 0
        self._counting = threading.Lock()
        self._paused: threading.Event | None = None
        self._ended = False
        self._tunnels: dict[int, _Tunnel] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tunnels", daemon=True)
        self._thread.start()

    def deliver(self, frame: Frame) -> None:
        """Hand over a frame of a guest-opened stream.

        Raises:
            MachineError: the guest sends faster than it may, and nothing would bound what is kept.

        """
        with self._counting:
            self._queued += _cost(frame)
            if self._queued > _MAX_QUEUED:
                raise MachineError("the guest agent sent more than it may", code="agent-protocol")
        self._frames.put(frame)
        self._wake()

    def pause(self, timeout: float) -> None:
        """Abort all tunnels; when this returns, nothing is sent until ``resume``.

        Raises:
            MachineError: the pump did not come to rest in time.

        """
        pausing = threading.Event()
        self._frames.put(pausing)
        self._wake()
        if not self._ended and not pausing.wait(timeout):
            raise MachineError("the egress did not come to rest", code="agent-timeout")

    def resume(self) -> None:
        """Serve again what the guest opens from now on; frames since ``pause`` are dropped."""
        self._frames.put(_RESUME)
        self._wake()

    def close(self) -> None:
        """Abort all tunnels and end the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._waker.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_SEND_SECONDS)

    def _wake(self) -> None:
        # A full pipe wakes as well as one byte more; after close there is nobody to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            self._ended = True
            self._drop_all()
            self._selector.close()
            self._woken.close()
            self._waker.close()

    def _step(self) -> bool:
        for key, events in self._selector.select():
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    if not self._woken.recv(4096):
                        return False
                self._take_frames()
                continue
            tunnel: _Tunnel = key.data
            if events & selectors.EVENT_WRITE and self._alive(tunnel):
                self._flush(tunnel)
            if events & selectors.EVENT_READ and self._alive(tunnel):
                self._receive(tunnel)
            self._settle(tunnel)
        return True

    def _alive(self, tunnel: _Tunnel) -> bool:
        return self._tunnels.get(tunnel.stream) is tunnel

    def _take_frames(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                frame = self._frames.get_nowait()
                if isinstance(frame, Frame):
                    with self._counting:
                        self._queued -= _cost(frame)
                if isinstance(frame, threading.Event):
                    self._paused = None if frame is _RESUME else frame
                    self._drop_all()
                    frame.set()
                elif self._paused is not None:
                    continue
                elif frame.type is FrameType.OPEN:
                    self._open(frame)
                elif (found := self._tunnels.get(frame.stream)) is not None:
                    self._take(found, frame)
                    self._settle(found)

    def _open(self, frame: Frame) -> None:
        stream = frame.stream
        if self._outside is None or stream in self._tunnels or len(self._tunnels) >= _MAX_TUNNELS:
            self._send(FrameType.RESET, stream, b"no egress")
            return
        try:
            destination, name = _asked(frame.payload)
        except MachineError:
            self._send(FrameType.RESET, stream, b"malformed")
            return
        if name is not None:
            permitted = self._outside.resolves(name)
            self._send(FrameType.EOF if permitted else FrameType.RESET, stream, b"")
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        tunnel = _Tunnel(stream=stream, socket=ours)
        self._tunnels[stream] = tunnel
        self._watch(tunnel)
        if not self._outside.accept(theirs, destination):
            self._reset(tunnel, b"denied")

    def _take(self, tunnel: _Tunnel, frame: Frame) -> None:
        if frame.type is FrameType.DATA:
            if len(tunnel.pending) + len(frame.payload) > WINDOW:
                self._reset(tunnel, b"more than the window allows")
                return
            tunnel.pending += frame.payload
            self._flush(tunnel)
        elif frame.type is FrameType.EOF:
            tunnel.guest_ended = True
            self._flush(tunnel)
        elif frame.type is FrameType.CREDIT:
            tunnel.credit = min(WINDOW, tunnel.credit + int.from_bytes(frame.payload[:4], "little"))
        else:
            self._drop(tunnel)

    def _flush(self, tunnel: _Tunnel) -> None:
        sent = 0
        try:
            while tunnel.pending and not tunnel.write_done:
                count = tunnel.socket.send(tunnel.pending)
                del tunnel.pending[:count]
                sent += count
        except BlockingIOError:
            pass
        except OSError:
            tunnel.write_done = True  # the other end reads no more
        if tunnel.write_done:
            sent += len(tunnel.pending)
            tunnel.pending.clear()
        if sent and not tunnel.guest_ended:
            self._send(FrameType.CREDIT, tunnel.stream, u32(sent))
        if tunnel.guest_ended and not tunnel.pending and not tunnel.write_done:
            tunnel.write_done = True
            with contextlib.suppress(OSError):
                tunnel.socket.shutdown(socket.SHUT_WR)

    def _receive(self, tunnel: _Tunnel) -> None:
        try:
            data = tunnel.socket.recv(min(tunnel.credit, MAX_DATA)) if tunnel.credit else None
        except BlockingIOError:
            return
        except OSError:
            self._reset(tunnel, b"connection lost")
            return
        if data is None:
            return
        if data:
            tunnel.credit -= len(data)
            self._send(FrameType.DATA, tunnel.stream, data)
        else:
            tunnel.read_done = True
            self._send(FrameType.EOF, tunnel.stream, b"")

    def _settle(self, tunnel: _Tunnel) -> None:
        if not self._alive(tunnel):
            return
        if tunnel.read_done and tunnel.guest_ended and not tunnel.pending:
            self._drop(tunnel)
        else:
            self._watch(tunnel)

    def _watch(self, tunnel: _Tunnel) -> None:
        events = 0
        if not tunnel.read_done and tunnel.credit:
            events |= selectors.EVENT_READ
        if tunnel.pending:
            events |= selectors.EVENT_WRITE
        watched = tunnel.socket in self._selector.get_map()
        if events and watched:
            self._selector.modify(tunnel.socket, events, tunnel)
        elif events:
            self._selector.register(tunnel.socket, events, tunnel)
        elif watched:
            self._selector.unregister(tunnel.socket)

    def _reset(self, tunnel: _Tunnel, why: bytes) -> None:
        self._send(FrameType.RESET, tunnel.stream, why)
        self._drop(tunnel)

    def _drop_all(self) -> None:
        for tunnel in list(self._tunnels.values()):
            self._drop(tunnel)

    def _drop(self, tunnel: _Tunnel) -> None:
        if self._tunnels.pop(tunnel.stream, None) is None:
            return
        if tunnel.socket in self._selector.get_map():
            self._selector.unregister(tunnel.socket)
        tunnel.socket.close()

    def _send(self, kind: FrameType, stream: int, payload: bytes) -> None:
        # A broken connection ends the pump through close(); each tunnel need not hear of it.
        with contextlib.suppress(MachineError):
            self._send_frame(kind, 0, stream, payload, Deadline.after(_SEND_SECONDS))


def _cost(frame: Frame) -> int:
    return _FRAME_COST + len(frame.payload)


def _asked(payload: bytes) -> tuple[Destination | None, str | None]:
    """Return the destination of a connection (None: the proxy) and the name of a lookup."""
    if not payload:
        return None, None
    fields = Fields(payload)
    kind, host, number = fields.u8(), fields.text(), fields.u32()
    if kind == _LOOKUP:
        return None, host
    if kind != _CONNECTION:
        raise MachineError("the guest agent opened what nobody knows", code="agent-protocol")
    return Destination(host, number), None
