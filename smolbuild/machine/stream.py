"""One request's share of the connection to the agent, as its caller sees it."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.wire import (
    MAX_DATA,
    WINDOW,
    Channel,
    Code,
    Fields,
    Frame,
    FrameType,
    u32,
)

__all__ = ["Data", "RequestStream"]

Send = Callable[[FrameType, int, bytes, Deadline], None]
"""Sends a frame of type, with channel and payload, on this stream."""

_GRANT = WINDOW // 4
"""Consumed bytes are granted again in lumps of this size, not for each frame."""


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes that arrived on one of a stream's channels."""

    channel: int
    payload: bytes


class RequestStream:
    """A request that was sent and is not yet answered.

    The reader thread calls ``deliver`` and ``fail``, which never block; callers the rest. What
    arrives and is not consumed is bounded by the window that the agent was granted.
    """

    def __init__(self, send: Send, what: str) -> None:
        self._send = send
        self._what = what
        self._changed = threading.Condition()
        self._posting = threading.Lock()
        self._closed = False
        self._arrived: deque[Data] = deque()
        self._waiting = 0
        self._ungranted = 0
        self._credit = WINDOW
        self._result: bytes | None = None
        self._failure: MachineError | None = None

    @property
    def finished(self) -> bool:
        """Return whether the agent owes nothing more."""
        with self._changed:
            return self._result is not None or self._failure is not None

    def deliver(self, frame: Frame) -> None:
        """Take a frame of this stream; more data than the window allows fails the stream."""
        with self._changed:
            if frame.type is FrameType.DATA:
                if not frame.payload:
                    return  # nothing to hand on, and no window would bound how many are kept
                self._waiting += len(frame.payload)
                if self._waiting + self._ungranted > WINDOW:
                    self._failure = MachineError(
                        "the guest agent sent more than it may", code="agent-protocol"
                    )
                else:
                    self._arrived.append(Data(frame.channel, frame.payload))
            elif frame.type is FrameType.CREDIT:
                granted = int.from_bytes(frame.payload[:4], "little")
                self._credit = min(WINDOW, self._credit + granted)
            elif frame.type is FrameType.RESULT:
                self._result = frame.payload
            elif frame.type is FrameType.RESET:
                reason = frame.payload.decode(errors="replace")[:200]
                self._failure = MachineError(f"{self._what}: the guest agent ended it: {reason}")
            self._changed.notify_all()

    def fail(self, error: MachineError) -> None:
        """End the stream from this side: who waits for it gets ``error``."""
        with self._changed:
            if self._result is None and self._failure is None:
                self._failure = error
                self._changed.notify_all()

    def next(self, deadline: Deadline) -> Data | Fields:
        """Return the next data, or the fields of the result after the last data.

        Raises:
            MachineError: the agent refused or failed, the connection broke, or the deadline passed.

        """
        with self._changed:
            self._wait(
                lambda: bool(self._arrived) or self._result is not None, deadline, "no answer"
            )
            if not self._arrived:
                return self._fields()
            data = self._arrived.popleft()
            self._waiting -= len(data.payload)
            self._ungranted += len(data.payload)
            grant = self._ungranted if self._ungranted >= _GRANT else 0
            if self._result is not None:
                grant = 0
            self._ungranted -= grant
        if grant:
            self._post(FrameType.CREDIT, 0, u32(grant), deadline)
        return data

    def result(self, deadline: Deadline) -> Fields:
        """Return the fields of the result; data before it are dropped.

        Raises:
            MachineError: as ``next``.

        """
        while True:
            arrived = self.next(deadline)
            if isinstance(arrived, Fields):
                return arrived

    def write(self, data: bytes, deadline: Deadline) -> bool:
        """Send ``data``, waiting for credit; return False when the agent wants no more.

        Raises:
            MachineError: the connection broke, or the deadline passed.

        """
        view = memoryview(data)
        while view:
            with self._changed:
                self._wait(
                    lambda: self._credit > 0 or self._result is not None, deadline, "no progress"
                )
                if self._result is not None:
                    return False
                part = view[: min(self._credit, MAX_DATA)]
                self._credit -= len(part)
            if not self._post(FrameType.DATA, Channel.IN, bytes(part), deadline):
                return False
            view = view[len(part) :]
        return True

    def end(self, deadline: Deadline) -> None:
        """Send the end of our bytes."""
        self._post(FrameType.EOF, 0, b"", deadline)

    def close(self) -> None:
        """Send nothing more, whatever thread tries; when this returns, nothing is being sent."""
        with self._posting:
            self._closed = True

    def _post(self, kind: FrameType, channel: int, payload: bytes, deadline: Deadline) -> bool:
        with self._posting:
            if not self._closed:
                self._send(kind, channel, payload, deadline)
            return not self._closed

    def _wait(self, predicate: Callable[[], bool], deadline: Deadline, lack: str) -> None:
        self._changed.wait_for(
            lambda: predicate() or self._failure is not None, timeout=deadline.left()
        )
        if self._failure is not None:
            raise self._failure
        if not predicate():
            raise MachineError(f"{self._what}: {lack} from the guest agent", code="agent-timeout")

    def _fields(self) -> Fields:
        fields = Fields(self._result or b"")
        code, detail = fields.u32(), fields.text()[:2000]
        if code == Code.OK:
            return fields
        name = Code(code).name.lower().replace("_", "-") if code in set(Code) else "unknown"
        raise MachineError(f"{self._what}: {detail or name}", code=f"agent-{name}")
