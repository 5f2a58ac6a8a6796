"""A minimal client of the QEMU machine protocol over a connected socket.

Protocol: QEMU, docs/interop/qmp-spec.rst. One JSON object per line in both directions; the server
greets, the client negotiates capabilities, then commands and answers alternate with events between.
"""

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError

__all__ = ["Qmp", "QmpEvent"]

QmpEvent = Mapping[str, Any]
"""The ``data`` member of an event."""

_LINE_LIMIT = 4 << 20
_EVENT_LIMIT = 256
"""Events nobody asked for are dropped beyond this many, oldest first."""


class Qmp:
    """One QMP session; safe to use from several threads, one command at a time.

    Args:
        connection: connected to QEMU's control chardev; owned and closed by this object.

    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.RLock()
        self._received = bytearray()
        self._events: deque[tuple[str, QmpEvent]] = deque(maxlen=_EVENT_LIMIT)
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._next_id = 0

    def greet(self, *, deadline: Deadline) -> str:
        """Read the greeting, leave capability negotiation, and return QEMU's version (``7.2.22``).

        Raises:
            MachineError: QEMU ended, did not greet by ``deadline``, or spoke something else.

        """
        greeting = self._read(deadline, "greet").get("QMP")
        if not isinstance(greeting, dict):
            raise MachineError("QEMU's control channel did not begin with a greeting")
        try:
            version = greeting["version"]["qemu"]
            text = f"{version['major']}.{version['minor']}.{version['micro']}"
        except (KeyError, TypeError) as error:
            raise MachineError("QEMU's greeting names no version") from error
        self.send("qmp_capabilities", deadline=deadline)
        return text

    def command(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline: Deadline,
        descriptor: int | None = None,
    ) -> Any:
        """Run a command and return its result.

        Args:
            name: the command.
            arguments: its arguments.
            deadline: by when it must be answered.
            descriptor: a file descriptor to pass along (``getfd``).

        Raises:
            MachineError: QEMU refused the command, ended, or did not answer by ``deadline``.

        """
        with self._lock:
            return self.result(
                self.send(name, arguments, deadline=deadline, descriptor=descriptor),
                name,
                deadline=deadline,
            )

    def send(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        deadline: Deadline,
        descriptor: int | None = None,
    ) -> int:
        """Send a command without waiting; QEMU runs commands in the order sent.

        Returns the number to ask ``result`` for. An answer never asked for is dropped, except that
        an error in it is raised by the next ``result``.

        Raises:
            MachineError: QEMU ended, or did not take the command by ``deadline``.

        """
        with self._lock:
            self._next_id += 1
            message = {"execute": name, "arguments": arguments or {}, "id": self._next_id}
            data = json.dumps(message).encode() + b"\n"
            descriptors = [] if descriptor is None else [descriptor]
            self._socket.settimeout(max(deadline.left(), 0.001))
            try:
                sent = socket.send_fds(self._socket, [data], descriptors)
                self._socket.sendall(data[sent:])
            except TimeoutError as error:
                raise _late(name) from error
            except OSError as error:
                raise _ended(name) from error
            return self._next_id

    def result(self, number: int, name: str, *, deadline: Deadline) -> Any:
        """Return the result of the command that ``send`` numbered.

        Raises:
            MachineError: QEMU refused it (code ``qmp``), ended, or did not answer by ``deadline``.

        """
        with self._lock:
            while number not in self._answers:
                message = self._read(deadline, name)
                if "event" in message:
                    self._keep_event(message)
                elif isinstance(message.get("id"), int):
                    self._keep_answer(number, message)
            answer = self._answers.pop(number)
        if "error" in answer:
            raise _refused(name, answer)
        return answer.get("return")

    def wait_event(
        self,
        name: str,
        *,
        deadline: Deadline,
        accept: Callable[[QmpEvent], bool] = lambda _: True,
    ) -> QmpEvent:
        """Return the data of the first event ``name`` that ``accept`` takes, seen or to come.

        Older events of that name that it does not take are dropped, others are kept.

        Raises:
            MachineError: QEMU ended, or no such event came by ``deadline``.

        """
        with self._lock:
            while True:
                for event in list(self._events):
                    if event[0] == name:
                        self._events.remove(event)
                        if accept(event[1]):
                            return event[1]
                message = self._read(deadline, f"wait for {name}")
                if "event" in message:
                    self._keep_event(message)
                elif isinstance(message.get("id"), int):
                    self._keep_answer(0, message)

    def close(self) -> None:
        """Close the session. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _keep_event(self, message: Mapping[str, Any]) -> None:
        data = message.get("data")
        self._events.append((str(message["event"]), data if isinstance(data, dict) else {}))

    def _keep_answer(self, wanted: int, message: Mapping[str, Any]) -> None:
        # Pipelined commands (send without result) are answered on the way: success needs no word.
        if message["id"] == wanted:
            self._answers[wanted] = message
        elif "error" in message:
            raise _refused(f"command {message['id']}", message)

    def _read(self, deadline: Deadline, doing: str) -> Mapping[str, Any]:
        while True:
            end = self._received.find(b"\n")
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                if line.strip():
                    return _parse(line)
                continue
            if len(self._received) > _LINE_LIMIT:
                raise MachineError(f"QEMU sent a control line of over {_LINE_LIMIT:,} bytes")
            left = deadline.left()
            if left <= 0:
                raise _late(doing)
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(65536)
            except TimeoutError as error:
                raise _late(doing) from error
            except OSError as error:
                raise _ended(doing) from error
            if not data:
                raise _ended(doing)
            self._received += data


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise MachineError(f"QEMU's control channel sent no JSON: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise MachineError(f"QEMU's control channel sent no object: {line[:80]!r}")
    return message


def _refused(name: str, answer: Mapping[str, Any]) -> MachineError:
    error = answer["error"]
    text = error.get("desc") if isinstance(error, dict) else None
    return MachineError(f"QEMU refused {name}: {text or error}", code="qmp")


def _ended(doing: str) -> MachineError:
    return MachineError(f"QEMU ended during {doing}", code="machine-ended")


def _late(doing: str) -> MachineError:
    return MachineError(f"QEMU did not answer {doing} in time", code="machine-timeout")
