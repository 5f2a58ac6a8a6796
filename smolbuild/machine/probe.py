"""Probes as the agent's fields, and a command's outcome as a probe's."""

import time
from collections.abc import Callable
from typing import Literal

from smolbuild.machine.base import ExecRequest, ExecResult, OnOutput, ProbeResult
from smolbuild.machine.wire import Fields, text, u8, u32
from smolbuild.model.smolfile import FileProbe, HttpProbe, PortProbe

__all__ = ["exec_probe", "probe_fields", "probe_result"]

_PORT, _HTTP, _FILE = 1, 2, 3
_TAIL = 400
_LONGEST = 2**32 - 1


def probe_fields(
    probe: PortProbe | HttpProbe | FileProbe, *, timeout: float, interval: float, until: float
) -> bytes:
    """Return the request of ``probe``; all times in seconds, ``until`` 0 for a single attempt."""
    match probe:
        case PortProbe():
            body = u8(_PORT) + text(probe.host) + u32(probe.port) + text("") + u32(0) + text("")
        case HttpProbe():
            body = (
                u8(_HTTP)
                + text(probe.host)
                + u32(probe.port)
                + text(probe.path)
                + u32(probe.status)
                + text(probe.contains)
            )
        case FileProbe():
            body = u8(_FILE) + text("") + u32(0) + text(probe.path) + u32(0) + text("")
    return body + _ms(timeout) + _ms(interval) + (_ms(until) if until else u32(0))


def probe_result(fields: Fields) -> ProbeResult:
    """Return what the agent answered."""
    ok, detail = bool(fields.u8()), fields.text()
    fields.u32()  # attempts
    return ProbeResult(ok=ok, detail=detail, seconds=fields.u64() / 1000)


def exec_probe(
    run: Callable[[ExecRequest, OnOutput | None], ExecResult], request: ExecRequest
) -> ProbeResult:
    """Run ``request`` as one attempt of a probe: it passes with exit status 0."""
    tail = bytearray()

    def keep(stream: Literal["stdout", "stderr"], data: bytes) -> None:
        del stream
        tail.extend(data)
        del tail[:-_TAIL]

    began = time.monotonic()
    result = run(request, keep)
    spent = time.monotonic() - began
    if result.timed_out:
        detail = f"{request.argv[0]} did not end within {request.timeout:g} s"
    else:
        detail = f"{request.argv[0]}: exit status {result.status}"
    if result.status and tail:
        detail += ": " + " ".join(bytes(tail).decode(errors="replace").split())
    return ProbeResult(ok=result.status == 0 and not result.timed_out, detail=detail, seconds=spent)


def _ms(seconds: float) -> bytes:
    return u32(min(_LONGEST, max(1, round(seconds * 1000))))
