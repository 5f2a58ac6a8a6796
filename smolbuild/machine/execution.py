"""An execution's request, its streams and its answer, as ``docs/agent-protocol.md`` has them."""

import contextlib
import threading
from typing import IO

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.base import ExecRequest, ExecResult, OnOutput
from smolbuild.machine.stream import Data, RequestStream
from smolbuild.machine.wire import Channel, Fields, lines, text, u32, u64

__all__ = ["ALIVE", "consume", "ended", "exec_fields", "exec_result", "feed"]

ALIVE = 2
"""State of an execution that has not ended."""
_EXEC_KEEP, _EXEC_TTY, _EXEC_STDIN, _EXEC_OFFLINE, _EXEC_SECRETS = 1, 2, 4, 8, 16


def exec_fields(exec_id: str, request: ExecRequest, *, fed: bool) -> bytes:
    """Return the payload of an EXEC request; ``fed``: standard input follows."""
    env, tty = request.env, request.tty
    if tty is not None and not any(name == "TERM" for name, _ in env):
        env = (*env, ("TERM", tty.kind))
    flags = (
        (_EXEC_KEEP if request.keep else 0)
        | (_EXEC_TTY if tty else 0)
        | (_EXEC_STDIN if fed else 0)
        | (_EXEC_OFFLINE if request.offline else 0)
        | (_EXEC_SECRETS if request.secrets else 0)
    )
    return (
        text(exec_id)
        + u32(flags)
        + u64(0 if request.keep else max(1, round(request.timeout * 1000)))
        + text(request.workdir)
        + text(request.user)
        + lines(request.argv)
        + lines(tuple(f"{name}={value}" for name, value in env))
        + (u32(tty.rows) + u32(tty.columns) if tty else b"")
    )


def feed(stream: RequestStream, source: bytes | IO[bytes], deadline: Deadline) -> None:
    """Feed standard input from a thread of its own: reading it may block for ever."""

    def feed() -> None:
        chunks = (source,) if isinstance(source, bytes) else iter(lambda: source.read(65536), b"")
        # The execution ended, or its connection did: its caller hears of that by itself.
        with contextlib.suppress(MachineError, OSError, ValueError):
            for chunk in chunks:
                if not stream.write(chunk, deadline):
                    return
            stream.end(deadline)

    threading.Thread(target=feed, name="stdin", daemon=True).start()


def consume(stream: RequestStream, on_output: OnOutput | None, deadline: Deadline) -> Fields:
    """Hand output on until the execution's last word, and return that."""
    while isinstance(arrived := stream.next(deadline), Data):
        if on_output is not None:
            on_output("stderr" if arrived.channel == Channel.ERR else "stdout", arrived.payload)
    return arrived


def exec_result(exec_id: str, fields: Fields) -> ExecResult:
    """Read the answer to an EXEC request."""
    if fields.u8() == ALIVE:
        return ExecResult(exec_id=exec_id, status=0)
    return ended(exec_id, fields)


def ended(exec_id: str, fields: Fields) -> ExecResult:
    """Read how an execution ended."""
    fields.u8()  # new, attached or recorded
    timed_out = bool(fields.u8())
    return ExecResult(exec_id=exec_id, status=fields.i32(), timed_out=timed_out)
