"""Executions at a terminal, in the real agent outside a machine."""

import os
import queue
import threading

import pytest

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.base import ExecRequest, ExecResult, Terminal
from smolbuild.machine.channel import AgentChannel

TTY = Terminal(rows=33, columns=101, kind="vt220")


class Person:
    """Types, and reads what comes out; the execution runs in a thread of its own."""

    def __init__(self, channel: AgentChannel, script: str, **options: object) -> None:
        self.channel = channel
        self.keys: queue.Queue[bytes] = queue.Queue()
        self.seen = bytearray()
        self.changed = threading.Condition()
        self.results: list[ExecResult] = []
        request = ExecRequest(
            argv=("/bin/sh", "-c", script),
            exec_id="tty",
            tty=TTY,
            stdin=self,  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
        self.thread = threading.Thread(target=self._run, args=(request,))
        self.thread.start()

    def read(self, size: int) -> bytes:
        return self.keys.get()[:size]

    def _run(self, request: ExecRequest) -> None:
        self.results.append(self.channel.exec(request, self._output))

    def _output(self, stream: str, data: bytes) -> None:
        assert stream == "stdout"
        with self.changed:
            self.seen += data
            self.changed.notify_all()

    def await_(self, text: bytes) -> None:
        deadline = Deadline.after(10)
        with self.changed:
            arrived = self.changed.wait_for(lambda: text in self.seen, timeout=deadline.left())
            assert arrived, bytes(self.seen)
            self.seen.clear()

    def end(self) -> ExecResult:
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.keys.put(b"")
        return self.results[0]


def test_a_program_has_a_terminal_of_its_size_and_kind(channel: AgentChannel) -> None:
    person = Person(channel, "test -t 0 && test -t 1 && test -t 2; echo $? $TERM $(stty size)")
    person.await_(b"0 vt220 33 101\r\n")
    assert person.end().status == 0


def test_keys_are_echoed_edited_and_signal(channel: AgentChannel) -> None:
    script = (
        "trap 'echo int; exit 5' INT; echo ready; read x; echo got:$x; while :; do read y; done"
    )
    person = Person(channel, script)
    person.await_(b"ready")
    person.keys.put("ab€\x7fc\r".encode())
    person.await_(b"got:abc")
    person.keys.put(b"\x03")
    person.await_(b"int")
    assert person.end().status == 5


def test_the_controlling_terminal_is_the_sessions(channel: AgentChannel) -> None:
    script = "echo through > /dev/tty; cut -d' ' -f6 /proc/$$/stat; echo $$"
    person = Person(channel, script)
    assert person.end().status == 0
    through, session, own = bytes(person.seen).split()
    assert through == b"through"
    assert session == own


def test_a_resize_is_seen_and_signalled(channel: AgentChannel) -> None:
    script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do read x; done"
    person = Person(channel, script)
    person.await_(b"ready")
    channel.resize("tty", 7, 65535)
    person.await_(b"7 65535")
    assert person.end().status == 0
    channel.resize("tty", 1, 1)  # its end crossed with the last resize: no error


def test_the_end_of_the_keys_is_ctrl_d(channel: AgentChannel) -> None:
    person = Person(channel, "echo ready; cat; echo over")
    person.await_(b"ready")
    person.keys.put(b"line\n")
    person.await_(b"line\r\nline\r\n")
    person.keys.put(b"")
    person.await_(b"over")
    assert person.end().status == 0


def test_what_is_left_in_the_background_goes_with_the_session(channel: AgentChannel) -> None:
    person = Person(channel, "sleep 1000 & echo $!; exit 3")
    assert person.end().status == 3
    pid = int(bytes(person.seen).split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_much_output_comes_whole(channel: AgentChannel) -> None:
    person = Person(channel, "stty -opost; head -c 3000000 /dev/zero")
    assert person.end().status == 0
    assert len(person.seen) == 3_000_000


def test_a_deadline_ends_it(channel: AgentChannel) -> None:
    assert Person(channel, "cat", timeout=0.3).end().timed_out


def test_a_killed_terminal_says_its_signal(channel: AgentChannel) -> None:
    person = Person(channel, "echo ready; cat")
    person.await_(b"ready")
    channel.kill("tty")
    assert person.end().status == 128 + 9


def test_what_makes_no_sense_is_refused(channel: AgentChannel) -> None:
    request = ExecRequest(argv=("true",), exec_id="service", keep=True, tty=TTY)
    with pytest.raises(MachineError, match="no terminal"):
        channel.exec(request)
    large = ExecRequest(argv=("true",), tty=Terminal(rows=70_000, columns=1))
    with pytest.raises(MachineError, match="malformed"):
        channel.exec(large)
    channel.exec(ExecRequest(argv=("sleep", "1000"), exec_id="plain", keep=True))
    with pytest.raises(MachineError, match="no terminal"):
        channel.resize("plain", 1, 1)
    with pytest.raises(MachineError, match="no execution"):
        channel.resize("other", 1, 1)
    channel.kill("plain")
