"""The host's side of the guest agent: what a machine can be asked, each with a deadline.

The protocol is described in ``docs/agent-protocol.md``; ``machine.connection`` moves its frames.
"""

import contextlib
import secrets
import socket
import time
from collections.abc import Generator, Iterable, Mapping, Sequence

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.base import (
    ExecRequest,
    ExecResult,
    Freshen,
    Identity,
    OnOutput,
    ProbeResult,
)
from smolbuild.machine.connection import AgentConnection
from smolbuild.machine.execution import ALIVE, consume, ended, exec_fields, exec_result, feed
from smolbuild.machine.probe import exec_probe, probe_fields, probe_result
from smolbuild.machine.stream import Data
from smolbuild.machine.survey import MAX_SURVEY_BYTES, parse_survey
from smolbuild.machine.tunnel import Outside
from smolbuild.machine.wire import MAX_PAYLOAD, Fields, Op, flag, text, u8, u32, u64
from smolbuild.model.inside import Survey
from smolbuild.model.smolfile import ExecProbe, Probe

__all__ = ["AgentChannel"]

_CALL_SECONDS = 30.0
"""For answers that the agent gives at once: a slow, busy, emulated guest still does."""
_GRACE_SECONDS = 20.0
"""Added to a deadline that the agent itself keeps, before the host gives it up."""
_KILL_SECONDS = 5.0
_TAKE, _GIVE = 0, 1
_FILLER = bytes(MAX_PAYLOAD - 64)
_FILLERS = 18
"""The guest's kernel receives into 1,024 buffers of a page, one after the other, and never clears
them: this many requests fill each of them."""
_RANGES = 8192
"""Ranges in one request: 16 bytes each."""
_SSH_HOST_KEYS = 1
_REGENERATE = {"machine-id": 0, "hostname": 0, "ssh-host-keys": _SSH_HOST_KEYS}


class AgentChannel:
    """A connection to a guest's agent. Every method may be called from any thread.

    All waits have deadlines; a passed deadline, a refusal or a broken connection is a
    ``MachineError`` (codes ``agent-timeout``, ``agent-gone``, ``agent-protocol``, or ``agent-`` and
    the agent's own).

    Args:
        sock: connected to the agent's port; the channel owns it from now on.
        cursor: what ``quiesce`` returned before the checkpoint that the guest was restored from;
            None for a guest that boots, which must be greeted with ``hello`` first.
        outside: decides on what guest programs ask for once tunnels are enabled.

    Raises:
        MachineError: the cursor is not one.

    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        cursor: bytes | None = None,
        outside: Outside | None = None,
    ) -> None:
        self._connection = AgentConnection(sock, cursor=cursor, outside=outside)

    # the connection

    def hello(self, timeout: float) -> None:
        """Wait until the agent of a booting guest answers, and agree on the protocol.

        Raises:
            MachineError: no answer in time, or an agent of another protocol version.

        """
        self._connection.hello(timeout)

    def close(self) -> None:
        """End the connection: who waits gets an error, tunnels are aborted. Idempotent."""
        self._connection.close()

    def ping(self, timeout: float = _CALL_SECONDS) -> None:
        """Return when the agent answers."""
        self._connection.call("the agent", Op.PING, b"", timeout)

    # executions

    def exec(self, request: ExecRequest, on_output: OnOutput | None = None) -> ExecResult:
        """Run ``request`` to its end (or start it, with ``keep``), streaming its output.

        An id that was used before attaches to that execution or returns its recorded result. When
        this call is left early (an error of ``on_output``, Ctrl-C), the execution is killed.
        """
        exec_id = request.exec_id or secrets.token_hex(16)
        fed = not isinstance(request.stdin, bytes) or bool(request.stdin)
        payload = exec_fields(exec_id, request, fed=fed)
        deadline = Deadline.after(request.timeout + _GRACE_SECONDS)
        what = f"execution of {request.argv[0] if request.argv else 'nothing'}"
        with self._connection.request(what, Op.EXEC, payload, deadline) as stream:
            try:
                if fed and not request.keep:
                    feed(stream, request.stdin, deadline)
                fields = consume(stream, on_output, deadline)
            except BaseException:
                if stream.finished:  # another request attached to it, or the agent is gone
                    raise
                with contextlib.suppress(MachineError):
                    self.kill(exec_id, timeout=_KILL_SECONDS)
                raise
        return exec_result(exec_id, fields)

    def kill(self, exec_id: str, signal: int = 0, *, timeout: float = _CALL_SECONDS) -> None:
        """Send ``signal`` to an execution's first process; 0: kill its whole tree. Idempotent."""
        self._connection.call("kill", Op.KILL, text(exec_id) + u32(signal), timeout)

    def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Give the terminal of an execution another size; one that ended is let be.

        Raises:
            MachineError: besides the usual, the execution has no terminal.

        """
        payload = text(exec_id) + u32(rows) + u32(columns)
        self._connection.call("resize", Op.RESIZE, payload, _CALL_SECONDS)

    def service_status(self, exec_id: str) -> ExecResult | None:
        """Return how an execution ended, or None while it is alive."""
        fields = self._connection.call("service status", Op.STATUS, text(exec_id), _CALL_SECONDS)
        if fields.raw(1)[0] == ALIVE:
            return None
        return ended(exec_id, fields)

    def service_output(self, exec_id: str) -> bytes:
        """Return the last output (at most 64 KiB) of a kept execution."""
        deadline = Deadline.after(_CALL_SECONDS)
        output = bytearray()
        with self._connection.request(
            "service output", Op.OUTPUT, text(exec_id), deadline
        ) as stream:
            while isinstance(arrived := stream.next(deadline), Data):
                output += arrived.payload
        return bytes(output)

    def survey(self, *, timeout: float = 60.0) -> Survey:
        """Return which processes run in the guest and where they listen."""
        deadline = Deadline.after(timeout + _GRACE_SECONDS)
        data = bytearray()
        payload = u32(_milliseconds(timeout))
        with self._connection.request("survey", Op.SURVEY, payload, deadline) as stream:
            while isinstance(arrived := stream.next(deadline), Data):
                data += arrived.payload
                if len(data) > MAX_SURVEY_BYTES:
                    raise MachineError("the agent's survey does not end", code="agent-protocol")
        return parse_survey(bytes(data))

    # files

    def put(self, archive: Iterable[bytes], target: str, *, timeout: float) -> None:
        """Unpack a tar stream below the guest directory ``target``, which is created when missing.

        Owners, modes and times are kept. Not atomic: an error leaves what was unpacked so far.
        """
        deadline = Deadline.after(timeout)
        payload = u64(_milliseconds(timeout)) + text(target)
        what = f"copy into {target}"
        with self._connection.request(what, Op.PUT, payload, deadline) as stream:
            for chunk in archive:
                if not stream.write(chunk, deadline):
                    break
            else:
                stream.end(deadline)
            stream.result(deadline)

    def get(self, path: str, *, timeout: float) -> Generator[bytes, None, None]:
        """Yield a tar stream of the guest path; its members' names begin with the last part of it.

        The stream comes from the guest and is not to be trusted.
        """
        deadline = Deadline.after(timeout)
        payload = u64(_milliseconds(timeout)) + text(path)
        with self._connection.request(f"copy of {path}", Op.GET, payload, deadline) as stream:
            while isinstance(arrived := stream.next(deadline), Data):
                yield arrived.payload

    # probes

    def probe(
        self,
        probe: Probe,
        *,
        timeout: float,
        env: tuple[tuple[str, str], ...] = (),
        workdir: str = "/",
        user: str = "root",
    ) -> ProbeResult:
        """Make one attempt of ``probe``; ``env``, ``workdir`` and ``user`` are for a command's."""
        if isinstance(probe, ExecProbe):
            request = ExecRequest(
                argv=probe.argv, env=env, timeout=timeout, workdir=workdir, user=user
            )
            return exec_probe(self.exec, request)
        payload = probe_fields(probe, timeout=timeout, interval=0.1, until=0.0)
        return probe_result(
            self._connection.call("probe", Op.PROBE, payload, timeout + _GRACE_SECONDS)
        )

    def probe_until(
        self, probe: Probe, *, deadline: float, interval: float = 0.1, attempt: float = 5.0
    ) -> ProbeResult:
        """Repeat ``probe`` until it passes or ``deadline`` seconds passed; return the last result.

        Port, HTTP and file probes are repeated inside the agent, in silence.
        """
        if not isinstance(probe, ExecProbe):
            payload = probe_fields(probe, timeout=attempt, interval=interval, until=deadline)
            return probe_result(
                self._connection.call("probe", Op.PROBE, payload, deadline + _GRACE_SECONDS)
            )
        began, until = time.monotonic(), Deadline.after(deadline)
        while True:
            result = self.probe(probe, timeout=max(0.05, min(attempt, until.left())))
            if result.ok or until.left() <= interval:
                spent = time.monotonic() - began
                return ProbeResult(ok=result.ok, detail=result.detail, seconds=spent)
            time.sleep(interval)

    # secrets

    def give_secrets(
        self, secrets: Mapping[str, bytes | bytearray], user: str, *, timeout: float = _CALL_SECONDS
    ) -> None:
        """Put each value into a file in the guest's memory that only ``user`` can read."""
        self._take_files(timeout)
        payload = bytearray(u32(_milliseconds(timeout)) + u8(_GIVE) + text(user))
        payload += u32(len(secrets))
        for name, value in secrets.items():
            payload += text(name) + u32(len(value)) + value
        try:
            self._connection.call("secrets", Op.SECRETS, bytes(payload), timeout + _GRACE_SECONDS)
        finally:
            payload[:] = bytes(len(payload))

    def take_secrets(self, *, timeout: float = _CALL_SECONDS) -> None:
        """Overwrite and remove what was given, and what the transport still holds. Idempotent."""
        self._take_files(timeout)
        for _ in range(_FILLERS):
            self._connection.call("the agent", Op.PING, _FILLER, timeout)

    def _take_files(self, timeout: float) -> None:
        payload = u32(_milliseconds(timeout)) + u8(_TAKE)
        self._connection.call("secrets", Op.SECRETS, payload, timeout + _GRACE_SECONDS)

    def zero_free(self, ranges: Sequence[tuple[int, int]], *, timeout: float = 300.0) -> None:
        """Zero the free blocks of the guest's disk, which must be frozen, within ``ranges``."""
        deadline = Deadline.after(timeout)
        for first in range(0, len(ranges), _RANGES):
            some = ranges[first : first + _RANGES]
            payload = u32(_milliseconds(deadline.left())) + u32(len(some))
            payload += b"".join(u64(offset) + u64(length) for offset, length in some)
            left = deadline.left() + _GRACE_SECONDS
            self._connection.call("scrubbing", Op.ZERO_FREE, payload, left)

    # freshness and checkpoints

    def freshen(self, call: Freshen, *, timeout: float = 60.0) -> Identity:
        """Thaw, set clock, entropy and names, regenerate: one round trip that returns the identity.

        Raises:
            MachineError: besides the usual, ``call.regenerate`` names something unknown.

        """
        unknown = [name for name in call.regenerate if name not in _REGENERATE]
        if unknown:
            raise MachineError(
                f"cannot regenerate {', '.join(unknown)}", hint=f"known: {', '.join(_REGENERATE)}"
            )
        names = text(call.hostname) + text(call.machine_id)
        wanted = 0
        for name in call.regenerate:
            wanted |= _REGENERATE[name]
        rest = secrets.token_bytes(64) + names + u32(wanted) + u32(_milliseconds(timeout))
        now = time.time_ns()
        clock = u64(now // 1_000_000_000) + u32(now % 1_000_000_000)
        return _identity(
            self._connection.call("freshen", Op.FRESHEN, clock + rest, timeout + _GRACE_SECONDS)
        )

    def identity(self) -> Identity:
        """Return the machine's identity, its clock and 32 fresh random bytes."""
        return _identity(self._connection.call("identity", Op.IDENTITY, b"", _CALL_SECONDS))

    def sync(self, *, drop_caches: bool = False, timeout: float = 120.0) -> None:
        """Write all dirty data to the disk; ``drop_caches`` also forgets clean pages in RAM."""
        payload = u32(_milliseconds(timeout)) + flag(drop_caches)
        self._connection.call("sync", Op.SYNC, payload, timeout + _GRACE_SECONDS)

    def freeze(self, *, timeout: float = 120.0) -> None:
        """Sync and freeze the root file system: what writes to it waits. Idempotent."""
        self._connection.call(
            "freeze", Op.FREEZE, u32(_milliseconds(timeout)), timeout + _GRACE_SECONDS
        )

    def thaw(self) -> None:
        """Undo ``freeze``. Idempotent."""
        self._connection.call("thaw", Op.THAW, b"", _CALL_SECONDS)

    def quiesce(self, *, names: bool = True, timeout: float = 30.0) -> bytes:
        """Bring the session to rest and return the cursor to go on with it, here or in a fork.

        ``names`` mounts the files that tell machines apart over their places, so that a fork takes
        another name quickly; a machine that is to go on as it is does without.
        Tunnels are aborted (new ones wait in the guest). After it, not a byte is under way in
        either direction; the next call, here or on a channel made with the cursor, goes on.

        Raises:
            MachineError: besides the usual, code ``agent-busy`` when another call is still open.

        """
        return self._connection.rest(names=names, timeout=timeout)

    def enable_tunnels(self, port: int = 3128) -> str:
        """Let the agent listen on the guest's loopback ``port`` and be its gateway. Idempotent.

        Returns what keeps it from being the gateway; empty when it is.
        """
        return self._connection.call("egress", Op.TUNNELS, u32(port), _CALL_SECONDS).text()

    def disable_tunnels(self) -> None:
        """Stop listening and abort what is open. Idempotent."""
        self._connection.call("egress", Op.TUNNELS, u32(0), _CALL_SECONDS)

    def shutdown(self, *, timeout: float = _CALL_SECONDS) -> None:
        """Ask the guest to end: processes killed, file systems synced, power off."""
        self._connection.call("shutdown", Op.SHUTDOWN, b"", timeout)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _identity(fields: Fields) -> Identity:
    machine_id, boot_id, random = fields.text(), fields.text(), fields.raw(32)
    clock = fields.u64() + fields.u32() / 1e9
    return Identity(machine_id=machine_id, boot_id=boot_id, random=random, clock=clock)
