"""The connection under ``AgentChannel``: one socket, one reader, many requests at once.

The session outlives a checkpoint: ``rest`` returns a cursor, and a connection made with it goes on
talking to the restored agent on a new socket, without a handshake. Its frames carry a later
*epoch*, so nothing of the machine's earlier life can be taken for an answer.
"""

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.stream import RequestStream, Send
from smolbuild.machine.tunnel import Outside, TunnelPump
from smolbuild.machine.wire import (
    MAX_PAYLOAD,
    PROTOCOL_VERSION,
    Fields,
    Frame,
    FrameReader,
    FrameType,
    Op,
    encode_frame,
    flag,
    u8,
    u32,
)

__all__ = ["AgentConnection"]

_CURSOR = b"smolbuild-agent-cursor-1 "
_JOIN_SECONDS = 30.0
_RESET_SECONDS = 1.0
_POLL_SECONDS = 2e6
"""More milliseconds than this do not fit into what poll(2) takes."""


class AgentConnection:
    """Frames to and from one agent. Every method may be called from any thread; all have deadlines.

    Args:
        sock: connected to the agent's port; owned by the connection from now on.
        cursor: what ``rest`` returned before the checkpoint; None for a guest that boots.
        outside: decides on what guest programs ask for; None: all is refused.

    Raises:
        MachineError: the cursor is not one.

    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        cursor: bytes | None,
        outside: Outside | None,
    ) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._epoch, self._last_stream = _parse_cursor(cursor) if cursor is not None else (1, 0)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._streams: dict[int, RequestStream] = {}
        self._greeting: queue.Queue[bytes] = queue.Queue(maxsize=1)
        self._gone: MachineError | None = None
        self._closing = False
        self._tunnels = TunnelPump(self.transmit, outside)
        self._reader = threading.Thread(target=self._read, name="agent", daemon=True)
        self._reader.start()

    def hello(self, timeout: float) -> None:
        """Wait until the agent of a booting guest answers, and agree on the protocol.

        Raises:
            MachineError: no answer in time, or an agent of another protocol version.

        """
        deadline = Deadline.after(timeout)
        self.transmit(FrameType.HELLO, 0, 0, u32(PROTOCOL_VERSION), deadline)
        try:
            fields = Fields(self._greeting.get(timeout=deadline.left()))
        except queue.Empty:
            raise MachineError(
                f"the guest agent did not answer within {timeout:.0f} s", code="agent-timeout"
            ) from None
        if self._gone is not None:
            raise self._gone
        version = fields.u32()
        if version != PROTOCOL_VERSION:
            raise MachineError(
                f"the guest agent speaks protocol {version}, this smolbuild {PROTOCOL_VERSION}",
                hint="build the artifact again with this version",
                code="agent-version",
            )

    def close(self) -> None:
        """End the connection: who waits gets an error, tunnels are aborted. Idempotent."""
        with self._lock:
            already, self._closing = self._closing, True
        if already:
            return
        self._break(MachineError("the connection to the guest agent was closed", code="agent-gone"))
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=_JOIN_SECONDS)
        self._tunnels.close()
        self._socket.close()

    def call(self, what: str, op: Op, payload: bytes, timeout: float) -> Fields:
        """Make a request that is answered by a result alone, and return its fields."""
        deadline = Deadline.after(timeout)
        with self.request(what, op, payload, deadline) as stream:
            return stream.result(deadline)

    @contextmanager
    def request(
        self, what: str, op: Op, payload: bytes, deadline: Deadline
    ) -> Iterator[RequestStream]:
        """Give the stream of a new request; left unfinished, the agent is told to abandon it."""
        if len(payload) >= MAX_PAYLOAD:
            raise MachineError(
                f"{what}: arguments and environment of {len(payload):,} bytes are too large",
                hint="copy long scripts into the guest as files",
            )
        with self._lock:
            if self._gone is not None:
                raise self._gone
            self._last_stream = number = self._last_stream % 0xFFFFFFF0 + 2
            stream = RequestStream(self._sender(number), what)
            self._streams[number] = stream
        try:
            self.transmit(FrameType.REQUEST, 0, number, u8(op) + payload, deadline)
            yield stream
        finally:
            stream.close()
            if not stream.finished:
                with contextlib.suppress(MachineError):
                    soon = Deadline.after(_RESET_SECONDS)
                    self.transmit(FrameType.RESET, 0, number, b"", soon)
            with self._lock:
                self._streams.pop(number, None)

    def rest(self, *, names: bool, timeout: float) -> bytes:
        """Bring the session to rest and return its cursor; the next request wakes it again.

        ``names`` makes ready what a fork needs to take another name quickly. After it, not a byte
        is under way in either direction, and none is until the next request.

        Raises:
            MachineError: code ``agent-busy`` when a request is still open.

        """
        with self._lock:
            if self._streams:
                raise MachineError("calls to the guest agent are still open", code="agent-busy")
        self._tunnels.pause(timeout)
        try:
            self.call("quiesce", Op.QUIESCE, flag(names), timeout)
            with self._lock:
                cursor = _CURSOR + u32(self._epoch) + u32(self._last_stream)
                self._epoch += 1
        finally:
            self._tunnels.resume()
        return cursor

    def transmit(
        self, kind: FrameType, channel: int, stream: int, payload: bytes, deadline: Deadline
    ) -> None:
        """Send one frame, whole or not at all (then the connection is broken)."""
        data = memoryview(encode_frame(Frame(kind, channel, self._epoch, stream, payload)))
        if not self._sending.acquire(timeout=max(0.001, deadline.left())):
            raise MachineError("the guest agent takes no more requests", code="agent-timeout")
        try:
            whole = len(data)
            while data:
                if self._gone is not None:
                    raise self._gone
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    if not _writable(self._socket, deadline):
                        error = MachineError(
                            "the guest agent takes no more requests", code="agent-timeout"
                        )
                        if len(data) != whole:  # half a frame is out: nothing can follow it
                            self._break(error)
                        raise error from None
        except OSError as error:
            raise self._lost() from error
        finally:
            self._sending.release()

    def _sender(self, number: int) -> Send:
        def send(kind: FrameType, channel: int, payload: bytes, deadline: Deadline) -> None:
            self.transmit(kind, channel, number, payload, deadline)

        return send

    def _read(self) -> None:
        frames = FrameReader()
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        try:
            while self._gone is None:
                poller.poll()
                try:
                    data = self._socket.recv(65536)
                except BlockingIOError:
                    continue
                if not data:
                    raise self._lost()
                for frame in frames.feed(data):
                    self._route(frame)
        except OSError:
            self._break(self._lost())
        except MachineError as error:
            self._break(error)

    def _route(self, frame: Frame) -> None:
        if frame.epoch != self._epoch:
            return  # of another life of this machine
        if frame.type is FrameType.HELLO:
            self._greet(frame.payload)
        elif frame.type is FrameType.FAULT:
            said = frame.payload.decode(errors="replace")[:200]
            raise MachineError(f"the guest agent understood nothing: {said}", code="agent-protocol")
        elif frame.stream % 2:
            self._tunnels.deliver(frame)
        else:
            with self._lock:
                stream = self._streams.get(frame.stream)
            if stream is not None:
                stream.deliver(frame)

    def _greet(self, payload: bytes) -> None:
        with contextlib.suppress(queue.Full):  # one answer is asked for, one is kept
            self._greeting.put_nowait(payload)

    @staticmethod
    def _lost() -> MachineError:
        return MachineError("the connection to the guest agent is gone", code="agent-gone")

    def _break(self, error: MachineError) -> None:
        with self._lock:
            if self._gone is None:
                self._gone = error
            streams = list(self._streams.values())
        self._greet(b"")  # wakes hello
        for stream in streams:
            stream.fail(error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader


def _writable(sock: socket.socket, deadline: Deadline) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    return bool(poller.poll(min(deadline.left(), _POLL_SECONDS) * 1000))


def _parse_cursor(cursor: bytes) -> tuple[int, int]:
    if not cursor.startswith(_CURSOR) or len(cursor) != len(_CURSOR) + 8:
        raise MachineError(
            "the checkpoint's agent session is of another version of smolbuild",
            hint="build the artifact again with this version",
            code="agent-version",
        )
    fields = Fields(cursor[len(_CURSOR) :])
    return fields.u32() + 1, fields.u32()
