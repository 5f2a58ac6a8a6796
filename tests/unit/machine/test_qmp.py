import json
import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.machine.qmp import Qmp

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 22}}, "capabilities": []}}


def soon():
    return Deadline.after(5)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    qmp = Qmp(ours)
    yield qmp, theirs
    qmp.close()
    theirs.close()


def tell(theirs, *messages):
    theirs.sendall(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))


def test_greeting_names_the_version_and_leaves_negotiation(pair):
    qmp, theirs = pair
    tell(theirs, GREETING)
    assert qmp.greet(deadline=soon()) == "7.2.22"
    assert json.loads(theirs.recv(1000))["execute"] == "qmp_capabilities"


@pytest.mark.parametrize("wrong", [{"hello": 1}, {"QMP": {}}, {"QMP": {"version": 3}}, {"QMP": []}])
def test_what_does_not_greet_is_not_qemu(pair, wrong):
    qmp, theirs = pair
    tell(theirs, wrong)
    with pytest.raises(MachineError, match="greeting"):
        qmp.greet(deadline=soon())


def test_results_errors_and_events_are_told_apart(pair):
    qmp, theirs = pair
    number = qmp.send("stop", deadline=soon())
    tell(
        theirs,
        {"event": "STOP", "timestamp": {}},
        {"event": "MIGRATION", "data": {"status": "setup"}},
        {"return": {"a": 1}, "id": number},
        {"event": "MIGRATION", "data": {"status": "completed"}},
    )
    assert qmp.result(number, "stop", deadline=soon()) == {"a": 1}
    done = qmp.wait_event(
        "MIGRATION", deadline=soon(), accept=lambda data: data["status"] == "completed"
    )
    assert done == {"status": "completed"}
    assert qmp.wait_event("STOP", deadline=soon()) == {}
    number = qmp.send("cont", {"x": 1}, deadline=soon())
    tell(theirs, {"error": {"class": "GenericError", "desc": "no such thing"}, "id": number})
    with pytest.raises(MachineError, match="cont: no such thing") as caught:
        qmp.result(number, "cont", deadline=soon())
    assert caught.value.code == "qmp"


def test_an_error_of_a_pipelined_command_is_not_lost(pair):
    qmp, theirs = pair
    first = qmp.send("one", deadline=soon())
    tell(theirs, {"error": {"desc": "refused"}, "id": first})
    with pytest.raises(MachineError, match="refused"):
        qmp.wait_event("X", deadline=soon())


def test_a_descriptor_goes_along(pair):
    qmp, theirs = pair
    reader, writer = os.pipe()
    qmp.send("getfd", {"fdname": "x"}, deadline=soon(), descriptor=writer)
    data, descriptors, _, _ = socket.recv_fds(theirs, 1000, 1)
    assert json.loads(data)["arguments"] == {"fdname": "x"}
    os.write(descriptors[0], b"through")
    assert os.read(reader, 10) == b"through"
    for number in (reader, writer, *descriptors):
        os.close(number)


def test_silence_and_end_are_errors(pair):
    qmp, theirs = pair
    with pytest.raises(MachineError) as caught:
        qmp.command("query-status", deadline=Deadline.after(0.05))
    assert caught.value.code == "machine-timeout"
    theirs.close()
    for call in (
        lambda: qmp.wait_event("X", deadline=soon()),
        lambda: qmp.command("stop", deadline=soon()),
    ):
        with pytest.raises(MachineError) as caught:
            call()
        assert caught.value.code == "machine-ended"


def test_a_line_without_end_is_refused(pair):
    qmp, theirs = pair

    def flood():
        try:
            for _ in range(6):
                theirs.sendall(b"x" * (1 << 20))
        except OSError:
            pass

    thread = threading.Thread(target=flood)
    thread.start()
    with pytest.raises(MachineError, match="bytes"):
        qmp.wait_event("X", deadline=soon())
    qmp.close()
    thread.join()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("AB"), st.integers()), max_size=20),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_any_split_of_the_stream_gives_the_same_events(events, sizes):
    ours, theirs = socket.socketpair()
    qmp = Qmp(ours)
    stream = b"".join(
        json.dumps({"event": name, "data": {"n": n}}).encode() + b"\n" for name, n in events
    )

    def feed():  # beside the reader: many small pieces fill the socket's buffer soon
        at = 0
        while at < len(stream):
            size = sizes[at % len(sizes)]
            theirs.sendall(stream[at : at + size])
            at += size
        theirs.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    for wanted in "AB":
        for name, n in events:
            if name == wanted:
                assert qmp.wait_event(name, deadline=soon()) == {"n": n}
    feeder.join(timeout=5)
    qmp.close()
    assert not feeder.is_alive()
