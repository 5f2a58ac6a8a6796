"""The agent as an ordinary program under the sanitizers, and the channel that talks to it."""

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smolbuild.guest.agent_source import agent_sources
from smolbuild.machine.channel import AgentChannel
from smolbuild.machine.tunnel import Destination

SANITIZED = ("-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


class Outside:
    """Hands every connection to ``serve`` and knows no name."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve

    def accept(self, connection: socket.socket, destination: Destination | None) -> bool:
        assert destination is None
        self._serve(connection)
        return True

    def resolves(self, name: str) -> bool:
        del name
        return False


class Agent:
    """An agent process that serves one end of a socket pair; the other end is ``sock``."""

    def __init__(self, program: Path, log: Path) -> None:
        self.sock, theirs = socket.socketpair()
        self.log = log
        with theirs, log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [program, "--serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "ASAN_OPTIONS": "detect_leaks=0"},
            )
        self._channels: list[AgentChannel] = []

    def channel(self, serve: Callable[[socket.socket], None] | None = None) -> AgentChannel:
        channel = AgentChannel(self.sock, outside=None if serve is None else Outside(serve))
        self._channels.append(channel)
        channel.hello(10)
        return channel

    def finish(self) -> None:
        """End it as a host does, by closing; it must end well and the sanitizers be silent."""
        for channel in self._channels:
            channel.close()
        self.sock.close()
        try:
            status = self.process.wait(timeout=10)
        finally:
            self.process.kill()
            self.process.wait()
        said = self.log.read_text(errors="replace")
        assert status == 0, said
        assert "Sanitizer" not in said
        assert "runtime error" not in said


@pytest.fixture(scope="session")
def agent_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the product's sources with the address and undefined-behaviour sanitizers."""
    program = tmp_path_factory.mktemp("agent") / "agent"
    sources = [str(path) for path in agent_sources() if path.suffix == ".c"]
    subprocess.run(
        ["gcc", *SANITIZED, "-fsanitize=address,undefined", "-o", str(program), *sources],
        check=True,
        timeout=120,
    )
    return program


@pytest.fixture
def agent(agent_program: Path, tmp_path: Path) -> Iterator[Agent]:
    started = Agent(agent_program, tmp_path / "agent.log")
    with contextlib.ExitStack() as stack:
        stack.callback(started.process.wait)
        stack.callback(started.process.kill)
        yield started
        started.finish()


@pytest.fixture
def channel(agent: Agent) -> AgentChannel:
    return agent.channel()
