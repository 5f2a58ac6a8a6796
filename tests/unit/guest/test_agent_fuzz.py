"""Bytes that no host would send: the real agent, under the sanitizers, goes on serving."""

import random
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.machine.channel import AgentChannel
from smolbuild.machine.wire import Frame, FrameReader, FrameType, Op, encode_frame, text, u8, u32


def drain(sock: socket.socket) -> None:
    sock.setblocking(False)
    try:
        while sock.recv(1 << 20):
            pass
    except BlockingIOError:
        pass
    sock.setblocking(True)


def answers_hello(sock: socket.socket, epoch: int) -> bool:
    """Whether a HELLO is answered, after whatever else was still to be sent."""
    sock.settimeout(10)
    sock.sendall(encode_frame(Frame(FrameType.HELLO, 0, epoch, 0, u32(1))))
    frames = FrameReader()
    while data := sock.recv(65536):
        if any(frame.type is FrameType.HELLO for frame in frames.feed(data)):
            return True
    return False


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes(agent, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        agent.sock.sendall(rng.randbytes(rng.randrange(1, 5000)))
        drain(agent.sock)
    # Zeros are no header, so they end whatever frame the garbage may have announced.
    agent.sock.sendall(bytes(300_000))
    drain_until_quiet(agent.sock)
    assert answers_hello(agent.sock, 0xFFFFFFFF)


def drain_until_quiet(sock: socket.socket) -> None:
    sock.settimeout(0.3)
    try:
        while sock.recv(1 << 20):
            pass
    except TimeoutError:
        pass


# Of the operations, those that could reach beyond the test's own directory are left out.
OPERATIONS = [Op.PING, Op.KILL, Op.STATUS, Op.OUTPUT, Op.PROBE, Op.IDENTITY, Op.QUIESCE, Op.FRESHEN]

fields = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 2**32 - 1).map(u32),
    st.integers(0, 5).map(u32),
    st.sampled_from(["", "/", "127.0.0.1", "x", "svc"]).map(text),
)
payloads = st.lists(fields, max_size=8).map(b"".join)
requests = st.builds(
    lambda op, rest: u8(op) + rest, st.sampled_from(OPERATIONS) | st.integers(17, 255), payloads
)
frames = st.builds(
    lambda kind, stream, payload: (kind, stream, payload),
    st.sampled_from([FrameType.REQUEST] * 4 + list(FrameType)),
    st.integers(0, 12),
    requests | payloads,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(frames, max_size=20))
def test_well_formed_nonsense(agent, sent: list[tuple[FrameType, int, bytes]]) -> None:
    for kind, stream, payload in sent:
        agent.sock.sendall(encode_frame(Frame(kind, 0, 1, stream, payload)))
        drain(agent.sock)
    assert answers_hello(agent.sock, 1)
    assert agent.process.poll() is None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(payloads)
def test_malformed_executions_start_nothing(channel: AgentChannel, payload: bytes) -> None:
    connection = channel._connection
    try:
        connection.call("fuzz", Op.EXEC, u32(0xFFFFFF) + payload, 10)
    except Exception as error:
        assert getattr(error, "code", "") == "agent-bad-request"  # noqa: PT017
    else:
        pytest.fail("accepted")
