"""Builds that fail, and people who look into their machines: real guests, a real terminal."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

pytestmark = pytest.mark.vm
SECONDS = 120
FAILING = """
[[smolbuild.step]]
name = "three"
workdir = "/made"
env = ["WORD=from-the-step"]
run = '''
echo half > /half
echo doing three
exit 7
'''
"""


class Person:
    """Sits at a terminal in front of ``smolbuild``."""

    def __init__(self, smolbuild, *args: str, **variables: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**smolbuild.environment(), "TERM": "xterm"}
        environment.pop("CI", None)
        environment.update(variables)
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment,
        )
        os.close(theirs)

    def until(self, text: str) -> str:
        """Return what came up to and with ``text``, without what draws and colours."""
        deadline = time.monotonic() + SECONDS
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, self.seen
            if select.select([self.ours], [], [], left)[0]:
                try:
                    self.seen += os.read(self.ours, 4096).decode(errors="replace")
                except OSError:
                    pytest.fail(f"it ended: {self.seen}")
                self.seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen)
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def end(self) -> int:
        with contextlib.suppress(OSError):  # the last one at the terminal has left
            while select.select([self.ours], [], [], SECONDS)[0]:
                self.seen += os.read(self.ours, 4096).decode(errors="replace")
        return self.process.wait(SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


START = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from smolbuild.cli.main import main
main()
"""


@pytest.fixture
def failing(own_project):
    smolfile = own_project / "Smolfile"
    before, service, after = smolfile.read_text().partition("[[smolbuild.service]]")
    smolfile.write_text(before + FAILING + "\n" + service + after)
    return own_project


@pytest.fixture
def sit(smolbuild):
    with contextlib.ExitStack() as stack:

        def start(*args: str, **variables: str) -> Person:
            return stack.enter_context(contextlib.closing(Person(smolbuild, *args, **variables)))

        yield start


def kept_on_disk(smolbuild) -> list:
    return smolbuild("debug", "--ls", "--json").document("debug")["kept"]


def left_running(smolbuild) -> list:
    return [*smolbuild.home.run.iterdir(), *smolbuild.machines()]


def test_a_person_looks_into_forks_mends_the_step_and_goes_on(smolbuild, sit, failing, built):
    person = sit("build", "-C", str(failing), "-t", "tiny:debug")
    shown = person.until("[q]uit: ")
    assert "step 1/3 one" in shown
    assert "cached" in shown
    assert "✗ step 3/3 three" in shown
    assert "doing three" in shown
    for _ in range(2):  # what is changed in a fork is not there in the next one
        person.type("s\n")
        person.until("Ctrl-D")
        person.type("cat /half; ls /mine; pwd; echo $WORD; touch /mine; tty; exit 3\n")
        shown = person.until("[q]uit: ")
        assert re.search(r"^half\r$", shown, re.MULTILINE), shown
        assert "No such file" in shown
        assert re.search(r"^/made\r$", shown, re.MULTILINE)
        assert re.search(r"^from-the-step\r$", shown, re.MULTILINE)
        assert "/dev/pts/" in shown
    (other,) = kept_on_disk(smolbuild)
    assert (other["name"], other["what"]) == ("test/tiny", "step three")
    done = smolbuild("debug", "test/tiny", "--", "cat", "/half")
    assert (done.status, done.stdout) == (0, "half\n")
    smolfile = failing / "Smolfile"
    smolfile.write_text(smolfile.read_text().replace("exit 7", "exit 0"))
    person.type("r\n")
    person.until("✓ step 3/3 three")
    person.until("tiny:debug: built, proven and signed")
    assert person.end() == 0
    assert kept_on_disk(smolbuild) == []
    assert left_running(smolbuild) == []


@pytest.mark.parametrize("leave", ["q\n", "\x03", "\x04", "hang up"])
def test_whoever_leaves_leaves_nothing_and_the_status_is_the_failures(
    smolbuild, sit, failing, built, leave
):
    person = sit("build", "-C", str(failing))
    person.until("[q]uit: ")
    assert len(left_running(smolbuild)) == 1  # the kept one's directory
    if leave == "hang up":
        os.kill(person.process.pid, signal.SIGHUP)
        assert person.end() == 143
    else:
        person.type(leave)
        assert person.end() == 1
    assert left_running(smolbuild) == []


def test_the_flag_opens_the_shell_at_once_and_a_hang_up_ends_it(smolbuild, sit, failing, built):
    person = sit("build", "-C", str(failing), "--debug-on-failure")
    person.until("Ctrl-D")
    person.type("echo $((40 + 2))\n")
    person.until("42")
    os.close(person.ours)
    person.ours = os.open(os.devnull, os.O_RDONLY)
    assert person.process.wait(SECONDS) == 143
    assert left_running(smolbuild) == []


def test_without_a_terminal_the_machine_is_kept_for_later(smolbuild, failing, built):
    done = smolbuild("build", "-C", str(failing), "--debug-on-failure", "--json")
    assert done.status == 1
    assert done.document("error")["error"]["code"] == "step-failed"
    assert "smolbuild debug test/tiny" in done.stderr
    again = smolbuild("build", "-C", str(failing), "--debug-on-failure")
    assert again.status == 1
    (kept,) = kept_on_disk(smolbuild)
    assert kept["what"] == "step three"
    assert "status 7" in kept["error"]
    (directory,) = (smolbuild.home.cache / "kept").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    for name in ("memory", "state", "kept.json"):
        assert (directory / name).stat().st_mode & 0o077 == 0
    done = smolbuild("debug", "--", "sh", "-c", "cat /half; pwd; echo err >&2; exit 9")
    assert (done.status, done.stdout, done.stderr) == (9, "half\n/made\n", "err\n")
    assert smolbuild("debug").status == 2  # no terminal
    assert smolbuild("debug", "--rm", "test/tiny").stdout == "dropped 1 machine\n"
    assert smolbuild("debug", "--rm", "../../store").stdout == "dropped 0 machines\n"
    assert kept_on_disk(smolbuild) == []
    assert smolbuild("debug", "test/tiny").status == 2
    assert left_running(smolbuild) == []


def test_a_failed_health_check_keeps_the_services(smolbuild, own_project, built):
    smolfile = own_project / "Smolfile"
    smolfile.write_text(smolfile.read_text().replace("it works", "it does not"))
    done = smolbuild("build", "-C", str(own_project), "--debug-on-failure")
    assert done.status == 3
    done = smolbuild("debug", "--", "busybox", "wget", "-qO-", "http://127.0.0.1:8000/")
    assert (done.status, done.stdout) == (0, "it works\n")
    smolbuild("debug", "--rm", "test/tiny")


def test_nobody_is_asked_in_ci(sit, failing, built):
    person = sit("build", "-C", str(failing), CI="true")
    assert person.end() == 1
    assert "[q]uit" not in person.seen
