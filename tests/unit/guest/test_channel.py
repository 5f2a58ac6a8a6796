"""The channel against a peer that misbehaves in every way: an error in time, never a hang."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import MachineError
from smolbuild.machine.base import ExecRequest
from smolbuild.machine.channel import AgentChannel
from smolbuild.machine.tunnel import TunnelPump
from smolbuild.machine.wire import (
    MAX_DATA,
    WINDOW,
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
    text,
    u8,
    u32,
)

OK = u32(0) + text("")
ENDED = OK + u8(1) + u8(0) + u8(0) + u32(0)
Reply = Callable[[Frame], bytes]


@contextlib.contextmanager
def talking_to(reply: Reply) -> Iterator[AgentChannel]:
    """Give a channel whose peer sends what ``reply`` returns for each frame; None: hangs up."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        frames = FrameReader()
        with theirs, contextlib.suppress(OSError):
            while data := theirs.recv(65536):
                for frame in frames.feed(data):
                    answer = reply(frame)
                    if answer is None:
                        return
                    theirs.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    channel = AgentChannel(ours)
    try:
        yield channel
    finally:
        channel.close()
        thread.join(10)
        assert not thread.is_alive()


def to(frame: Frame, kind: FrameType, payload: bytes, *, epoch: int | None = None) -> bytes:
    return encode_frame(
        Frame(kind, 1, frame.epoch if epoch is None else epoch, frame.stream, payload)
    )


def test_no_answer_is_an_error_at_the_deadline() -> None:
    with talking_to(lambda _frame: b"") as channel:
        began = time.monotonic()
        with pytest.raises(MachineError) as caught:
            channel.hello(0.2)
        assert caught.value.code == "agent-timeout"
        with pytest.raises(MachineError) as caught:
            channel.ping(0.2)
        assert caught.value.code == "agent-timeout"
        assert time.monotonic() - began < 5


def test_a_peer_that_reads_nothing_is_an_error_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(AgentChannel(ours)) as channel:
        with pytest.raises(MachineError) as caught:
            channel.put((b"x" * MAX_DATA for _ in range(1000)), "/x", timeout=0.3)
        assert caught.value.code == "agent-timeout"


def test_a_hang_up_ends_every_call_and_all_later_ones() -> None:
    with talking_to(lambda _frame: None) as channel:
        for _ in range(2):
            with pytest.raises(MachineError) as caught:
                channel.ping(10)
            assert caught.value.code == "agent-gone"


def test_close_wakes_who_waits_and_is_idempotent() -> None:
    failures: list[str] = []
    asked = threading.Event()

    def reply(_frame: Frame) -> bytes:
        asked.set()
        return b""

    with talking_to(reply) as channel:

        def wait() -> None:
            try:
                channel.ping(20)
            except MachineError as error:
                failures.append(error.code)

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert asked.wait(10)
        channel.close()
        channel.close()
        waiter.join(5)
    assert failures == ["agent-gone"]


def test_another_protocol_version_is_refused() -> None:
    with talking_to(lambda frame: to(frame, FrameType.HELLO, u32(99))) as channel:
        with pytest.raises(MachineError, match="protocol 99") as caught:
            channel.hello(5)
        assert caught.value.code == "agent-version"


def test_frames_of_another_life_are_ignored() -> None:
    def reply(frame: Frame) -> bytes:
        stale = to(frame, FrameType.RESULT, u32(4) + text("stale"), epoch=frame.epoch + 1)
        older = to(frame, FrameType.RESULT, u32(4) + text("stale"), epoch=0)
        return stale + older + to(frame, FrameType.RESULT, OK)

    with talking_to(reply) as channel:
        channel.ping(5)


def test_the_epoch_grows_with_each_rest() -> None:
    epochs = []

    def reply(frame: Frame) -> bytes:
        epochs.append(frame.epoch)
        return to(frame, FrameType.RESULT, OK)

    with talking_to(reply) as channel:
        channel.ping(5)
        channel.quiesce()
        channel.ping(5)
        cursor = channel.quiesce()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.closing(AgentChannel(ours, cursor=cursor)) as next_life:
            with pytest.raises(MachineError):
                next_life.ping(0.1)
            [first, *_] = FrameReader().feed(theirs.recv(4096))
    assert epochs == [1, 1, 2, 2]
    assert first.epoch == 3
    assert first.stream > 8


def slowly(chunks: Iterable[bytes]) -> None:
    for _ in chunks:
        time.sleep(0.01)


def test_more_data_than_the_window_fails_the_call_not_the_memory() -> None:
    def reply(frame: Frame) -> bytes:
        if frame.type is not FrameType.REQUEST:
            return b""
        return to(frame, FrameType.DATA, b"x" * MAX_DATA) * (WINDOW // MAX_DATA + 1)

    with talking_to(reply) as channel:
        copy = channel.get("/x", timeout=10)
        with pytest.raises(MachineError, match="more than it may"):
            slowly(copy)


def test_empty_data_are_not_kept_so_that_a_flood_of_them_costs_nothing() -> None:
    heard: list[bytes] = []

    def reply(frame: Frame) -> bytes:
        if frame.type is not FrameType.REQUEST:
            return b""
        flood = to(frame, FrameType.DATA, b"") * 1000
        return flood + to(frame, FrameType.DATA, b"x") + to(frame, FrameType.RESULT, ENDED)

    with talking_to(reply) as channel:
        channel.exec(ExecRequest(argv=("x",)), lambda _, data: heard.append(data))
    assert heard == [b"x"]


def test_greetings_nobody_asked_for_are_not_collected() -> None:
    def reply(frame: Frame) -> bytes:
        if frame.type is not FrameType.REQUEST:
            return b""
        return to(frame, FrameType.HELLO, u32(1)) * 1000 + to(frame, FrameType.RESULT, OK)

    with talking_to(reply) as channel:
        channel.ping(5)
        assert channel._connection._greeting.qsize() == 1


def flood(pump: TunnelPump, frame: Frame, *, count: int = 1000) -> None:
    for _ in range(count):
        pump.deliver(frame)


def test_a_guest_that_floods_the_tunnels_is_cut_off_not_remembered() -> None:
    stuck = threading.Event()

    def send(*_: object) -> None:
        assert stuck.wait(20)

    pump = TunnelPump(send, None)
    pump.deliver(Frame(FrameType.OPEN, 0, 1, 3, b""))  # the pump refuses it, and hangs in sending
    part = Frame(FrameType.DATA, 0, 1, 3, bytes(WINDOW))
    try:
        with pytest.raises(MachineError) as caught:
            flood(pump, part)
        assert caught.value.code == "agent-protocol"
    finally:
        stuck.set()
        pump.close()
    served = TunnelPump(lambda *_: None, None)  # one that is served may send as much as it likes
    for _ in range(20):
        flood(served, part, count=100)
        served.pause(10)
        served.resume()
    served.close()


def test_a_refusal_carries_the_agents_words() -> None:
    answer = u32(4) + text("disk on fire")
    refusing = talking_to(lambda frame: to(frame, FrameType.RESULT, answer))
    with refusing as channel, pytest.raises(MachineError, match="disk on fire") as caught:
        channel.exec(ExecRequest(argv=("x",)))
    assert caught.value.code == "agent-system"


@pytest.mark.parametrize("payload", [b"", u32(0), OK, OK + b"\1\0", u32(77) + text("?")])
def test_truncated_results_are_errors(payload: bytes) -> None:
    answering = talking_to(lambda frame: to(frame, FrameType.RESULT, payload))
    with answering as channel, pytest.raises(MachineError):
        channel.identity()


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=16, max_size=200))
def test_garbage_never_hangs_a_caller(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(AgentChannel(ours)) as channel:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(MachineError):
            channel.ping(5)


def test_closing_leaves_no_descriptor_and_no_thread() -> None:
    descriptors, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(5):
        with talking_to(lambda frame: to(frame, FrameType.RESULT, OK)) as channel:
            channel.ping(5)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert threading.active_count() == threads
