"""Lends the terminal of its standard input to a script in an agent; not a test by itself."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios

from smolbuild.cli.terminal import interactive
from smolbuild.machine.base import ExecRequest
from smolbuild.machine.channel import AgentChannel


class Terminated(BaseException):
    pass


def on_signal(number, frame):
    raise Terminated


def main(agent: str, script: str) -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGHUP, on_signal)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [agent, "--serve", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    channel = AgentChannel(ours)
    try:
        channel.hello(20)
        result = interactive(channel, ExecRequest(argv=("/bin/sh", "-c", script)), os.environ)
        os.write(1, b"status %d\n" % result.status)
        if "later" in script:
            os.write(1, b"typed %s" % os.read(0, 100))
    except Terminated:
        sys.exit(143)
    finally:
        channel.close()
        process.wait(20)


main(*sys.argv[1:])
