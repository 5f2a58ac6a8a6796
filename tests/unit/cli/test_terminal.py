"""The user's terminal, lent to a program in a real agent and given back."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from smolbuild.cli.options import has_person
from smolbuild.cli.terminal import interactive
from smolbuild.core.errors import UsageError
from smolbuild.guest.compile import build_agent
from smolbuild.machine.base import ExecRequest

SECONDS = 30


class Person:
    """Sits at a terminal at which a script runs."""

    def __init__(self, agent: Path, script: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.size(24, 80)
        self.before = termios.tcgetattr(self.theirs)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("terminal_driver.py")), agent, script],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "vt100"},
        )

    def size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def await_(self, text: bytes) -> bytes:
        """Return what came up to and with ``text``."""
        deadline = time.monotonic() + SECONDS
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, self.seen
            if select.select([self.ours], [], [], left)[0]:
                self.seen += os.read(self.ours, 4096)
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def is_restored(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def hang_up(self) -> None:
        for name in ("ours", "theirs"):
            if (descriptor := getattr(self, name)) >= 0:
                os.close(descriptor)
            setattr(self, name, -1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()


def is_gone(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], SECONDS)[0])
    finally:
        os.close(process)


@pytest.fixture
def sit(home):
    agent = build_agent(home.cache)
    with contextlib.ExitStack() as stack:

        def start(script: str) -> Person:
            return stack.enter_context(contextlib.closing(Person(agent, script)))

        yield start


def test_keys_go_there_and_the_terminal_comes_back(sit):
    person = sit("echo ready $TERM; read x; echo got $x; exit 7")
    person.await_(b"ready vt100\r\n")
    assert not person.is_restored()
    person.type(b"word\r")
    person.await_(b"got word\r\n")
    person.await_(b"status 7\r\n")
    assert person.process.wait(SECONDS) == 0
    assert person.is_restored()


def test_ctrl_c_is_a_key(sit):
    person = sit("trap 'echo caught' INT; echo ready; read x; read x; echo over $x")
    person.await_(b"ready")
    person.type(b"\x03")
    person.await_(b"caught")
    person.type(b"\rend\r")
    person.await_(b"over")
    person.await_(b"status 0")


def test_a_new_size_is_passed_on(sit):
    person = sit("trap 'stty size' WINCH; echo ready; while read x; do :; done")
    person.await_(b"ready")
    person.size(11, 222)
    person.await_(b"11 222")
    person.type(b"\x04")
    person.await_(b"status 0")


def test_a_program_that_does_not_end_can_be_left(sit):
    person = sit("trap '' INT HUP TERM; echo ready; sleep 1000 & wait")
    person.await_(b"ready")
    person.type(b"\x1d\x1dx")
    person.await_(b"^]^]x")
    assert person.process.poll() is None
    person.type(b"\x1d\x1d")
    person.await_(b"^]^]")
    person.type(b"\x1d")
    person.await_(b"status 129")
    assert person.process.wait(SECONDS) == 0
    assert person.is_restored()


def test_keys_typed_after_its_end_are_not_taken(sit):
    person = sit("stty -echo; echo later; exit 0")
    person.await_(b"status 0")
    person.type(b"more\n")
    person.await_(b"typed more")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_and_gives_the_terminal_back(sit, tmp_path, number):
    note = tmp_path / "pid"
    person = sit(f"echo $$ > {note}; echo ready; exec sleep 1000")
    person.await_(b"ready")
    person.process.send_signal(number)
    assert person.process.wait(SECONDS) == 143
    assert person.is_restored()
    assert is_gone(int(note.read_text()))


def test_a_hang_up_ends_the_program(sit, tmp_path):
    note = tmp_path / "pid"
    person = sit(f"echo $$ > {note}; echo ready; exec sleep 1000")
    person.await_(b"ready")
    person.hang_up()
    assert person.process.wait(SECONDS) == 143
    assert is_gone(int(note.read_text()))


def test_without_a_terminal_it_is_refused():
    read, write = os.pipe()
    try:
        with pytest.raises(UsageError, match="no terminal"):
            interactive(None, ExecRequest(argv=("sh",)), {}, keys=read)
    finally:
        os.close(read)
        os.close(write)


def test_nobody_is_asked_without_a_terminal_or_in_ci(monkeypatch):
    assert not has_person({})
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert has_person({})
    assert not has_person({"CI": "true"})
