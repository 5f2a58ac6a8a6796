"""Probes, tunnels and quiescence of the real agent."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smolbuild.core.errors import MachineError
from smolbuild.machine.base import ExecRequest
from smolbuild.machine.channel import AgentChannel
from smolbuild.model.smolfile import ExecProbe, FileProbe, HttpProbe, PortProbe


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def says(data: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(data)

    return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_port(channel: AgentChannel) -> None:
    with server(says(b"")) as port:
        assert channel.probe(PortProbe(port=port), timeout=5).ok
        assert channel.probe(PortProbe(port=port, host="localhost"), timeout=5).ok
    closed = channel.probe(PortProbe(port=free_port()), timeout=5)
    assert not closed.ok
    assert "refused" in closed.detail


def test_http(channel: AgentChannel) -> None:
    with server(says(b'HTTP/1.1 200 OK\r\n\r\n{"notes": 1000}')) as port:
        assert channel.probe(HttpProbe(port=port, path="/x?y=1"), timeout=5).ok
        assert channel.probe(HttpProbe(port=port, contains="1000"), timeout=5).ok
        lacking = channel.probe(HttpProbe(port=port, contains="1001"), timeout=5)
        assert not lacking.ok
        assert '"notes": 1000' in lacking.detail
    with server(says(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")) as port:
        failing = channel.probe(HttpProbe(port=port), timeout=5)
        assert "status 503, expected 200" in failing.detail
        assert channel.probe(HttpProbe(port=port, status=503), timeout=5).ok


@pytest.mark.parametrize("data", [b"", b"\0\xff" * 50_000, b"HTTP/1.1 ", b"HTTP/9.9 9999999 \r\n"])
def test_http_nonsense_is_a_failed_probe(channel: AgentChannel, data: bytes) -> None:
    with server(says(data)) as port:
        assert not channel.probe(HttpProbe(port=port, contains="x"), timeout=2).ok


def test_an_answer_that_never_ends_is_cut(channel: AgentChannel) -> None:
    def forever(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(b"y" * 65536)

    with server(forever) as port:
        began = time.monotonic()
        assert not channel.probe(HttpProbe(port=port, contains="x"), timeout=5).ok
        assert time.monotonic() - began < 4


def test_a_silent_server_costs_the_timeout_and_no_more(channel: AgentChannel) -> None:
    def silent(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with server(silent) as port:
        began = time.monotonic()
        late = channel.probe(HttpProbe(port=port), timeout=0.2)
        assert not late.ok
        assert "200 ms" in late.detail
        assert 0.15 < time.monotonic() - began < 3


def test_file_and_until(channel: AgentChannel, tmp_path: Path) -> None:
    path = tmp_path / "ready"
    missing = channel.probe_until(FileProbe(path=str(path)), deadline=0.2, interval=0.05)
    assert not missing.ok
    channel.exec(ExecRequest(argv=("sh", "-c", f"sleep 0.2; touch {path}"), exec_id="t", keep=True))
    found = channel.probe_until(FileProbe(path=str(path)), deadline=10, interval=0.02)
    assert found.ok
    assert found.seconds > 0.1


def test_other_requests_go_on_while_a_probe_waits(channel: AgentChannel) -> None:
    results = []
    port = free_port()
    waiter = threading.Thread(
        target=lambda: results.append(channel.probe_until(PortProbe(port=port), deadline=1.0))
    )
    waiter.start()
    channel.ping(timeout=0.9)
    waiter.join(10)
    assert not results[0].ok


def test_exec_probe(channel: AgentChannel) -> None:
    assert channel.probe(ExecProbe(argv=("true",)), timeout=5).ok
    failed = channel.probe(ExecProbe(argv=("sh", "-c", "echo broken; exit 3")), timeout=5)
    assert not failed.ok
    assert failed.detail == "sh: exit status 3: broken"
    late = channel.probe(ExecProbe(argv=("sleep", "30")), timeout=0.2)
    assert "did not end" in late.detail
    passed = channel.probe_until(ExecProbe(argv=("true",)), deadline=5)
    assert passed.ok


@pytest.mark.parametrize(
    "probe",
    [
        PortProbe(port=0),
        PortProbe(port=80, host="example.com"),
        HttpProbe(port=80, path="no-slash"),
        HttpProbe(port=80, path="/a b\r\nX: y"),
        FileProbe(path="relative"),
    ],
)
def test_malformed_probes_are_refused(
    channel: AgentChannel, probe: PortProbe | HttpProbe | FileProbe
) -> None:
    with pytest.raises(MachineError) as caught:
        channel.probe(probe, timeout=1)
    assert caught.value.code == "agent-bad-request"


def echo(connection: socket.socket) -> None:
    """Send back what comes, in capitals, until its end; then end."""

    def run() -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data.upper())

    threading.Thread(target=run, daemon=True).start()


def test_tunnels_carry_bytes_and_half_closes(agent) -> None:
    channel = agent.channel(serve=echo)
    port = free_port()
    channel.enable_tunnels(port)
    data = b"some bytes " * 100_000
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as guest:
            sender = threading.Thread(
                target=lambda guest=guest: (guest.sendall(data), guest.shutdown(socket.SHUT_WR))
            )
            sender.start()
            with guest.makefile("rb") as stream:
                assert stream.read() == data.upper()
            sender.join(10)
    channel.disable_tunnels()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_more_connections_than_tunnels_wait_and_cost_nothing(agent) -> None:
    channel = agent.channel(serve=echo)
    port = free_port()
    channel.enable_tunnels(port)
    with contextlib.ExitStack() as stack:
        guests = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(129)
        ]
        for guest in guests:
            guest.sendall(b"x")
        for guest in guests[:128]:
            assert guest.recv(1) == b"X"
        before = cpu_ticks(agent.process.pid)
        guests[128].settimeout(0.5)
        with pytest.raises(TimeoutError):
            guests[128].recv(1)
        assert cpu_ticks(agent.process.pid) - before < 20  # of some 50 that half a second has
        guests[0].close()
        guests[128].settimeout(10)
        assert guests[128].recv(1) == b"X"


def test_without_egress_a_tunnel_is_aborted(agent) -> None:
    channel = agent.channel(serve=None)
    port = free_port()
    channel.enable_tunnels(port)
    address = ("127.0.0.1", port)
    with (
        pytest.raises(ConnectionResetError),  # while connecting already, when that takes long
        socket.create_connection(address, timeout=10) as guest,
    ):
        guest.recv(1)


def test_the_session_rests_and_goes_on(agent) -> None:
    channel = agent.channel(serve=echo)
    port = free_port()
    channel.enable_tunnels(port)
    channel.exec(ExecRequest(argv=("sleep", "60"), exec_id="service", keep=True))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as old:
        old.sendall(b"x")
        assert old.recv(1) == b"X"
        channel.quiesce()
        with pytest.raises(ConnectionResetError):
            old.recv(1)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as waiting:
            waiting.sendall(b"later")
            waiting.settimeout(0.2)
            with pytest.raises(TimeoutError):  # nobody answers while the session rests
                waiting.recv(1)
            waiting.settimeout(10)
            assert channel.service_status("service") is None  # the first call of the next life
            assert waiting.recv(5) == b"LATER"
    channel.kill("service")


def test_quiesce_refuses_while_calls_are_open(channel: AgentChannel) -> None:
    began = threading.Event()
    thread = threading.Thread(
        target=lambda: channel.exec(
            ExecRequest(argv=("sh", "-c", "echo; sleep 0.5")), lambda _s, _d: began.set()
        )
    )
    thread.start()
    assert began.wait(10)
    with pytest.raises(MachineError) as caught:
        channel.quiesce()
    assert caught.value.code == "agent-busy"
    thread.join(10)
    channel.quiesce()


def test_a_cursor_goes_on_without_a_handshake(agent) -> None:
    """As a restore does it: the agent's session as it was, a new socket and channel on the host."""
    lives = [socket.socketpair() for _ in range(2)]
    turn = threading.Event()

    def carry() -> None:
        for _, theirs in lives:
            relay(agent.sock, theirs)
            turn.set()

    carrier = threading.Thread(target=carry)
    carrier.start()
    first = AgentChannel(lives[0][0])
    first.hello(10)
    first.exec(ExecRequest(argv=("true",), exec_id="before"))
    cursor = first.quiesce()
    first.close()
    assert turn.wait(10)
    second = AgentChannel(lives[1][0], cursor=cursor)
    ended = second.service_status("before")
    second.close()
    carrier.join(10)
    assert ended is not None
    assert ended.status == 0


def relay(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until ``other`` ends."""
    with other:
        while True:
            for ready in select.select([one, other], [], [], 20)[0]:
                data = ready.recv(65536)
                if not data:
                    return
                (other if ready is one else one).sendall(data)


def test_a_foreign_cursor_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(MachineError) as caught:
        AgentChannel(ours, cursor=b"something else")
    assert caught.value.code == "agent-version"
