"""What is read from an agent's survey, and what a malformed one does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.errors import MachineError
from smolbuild.machine.survey import parse_survey
from smolbuild.model.inside import GuestPort, GuestProcess, Survey

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 501 1 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 502 1 0
   2: 0100007F:1F40 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 503 1 0
   3: 0100007F:0C38 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 504 1 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0 0 0 0 0 505
"""
UDP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 506 1 0
"""
PASSWD = "root:x:0:0::/:/bin/sh\nweb:x:33:33::/:/bin/sh\ntoor:x:0:0::/:\n"


def record(kind: str, number: int, content: str | bytes) -> bytes:
    data = content if isinstance(content, bytes) else content.encode()
    return f"{kind} {number} {len(data)}\n".encode() + data


def process(
    pid: int,
    argv: str,
    *,
    name: str = "prog",
    uid: int = 0,
    parent: int = 1,
    group: int = 0,
    sockets: str = "",
) -> bytes:
    status = f"Name:\t{name}\nUmask:\t0022\nPPid:\t{parent}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
    return b"".join(
        [
            record("cmdline", pid, argv.replace(" ", "\0") + "\0"),
            record("status", pid, status),
            record("cgroup", pid, f"0::/smolbuild/{group}\n" if group else "0::/\n"),
            record("sockets", pid, sockets) if sockets else b"",
        ]
    )


def test_processes_and_ports() -> None:
    data = b"".join(
        [
            record("agent", 1, ""),
            record("worker", 99, ""),
            record("job", 3, "service:web"),
            record("job", 4, "step:two"),
            record("passwd", 0, PASSWD),
            process(1, "/init", sockets="504 "),
            process(99, "/init"),
            process(40, "httpd -f -p 8000", name="httpd", group=3, sockets="501 503 "),
            process(41, "httpd -f -p 8000", name="httpd", group=3, sockets="501 "),
            process(50, "nginx: worker", name="nginx", uid=33, sockets="502 "),
            process(51, "left", uid=77, group=4),
            record("tcp", 40, TCP),
            record("tcp6", 40, TCP6),
            record("udp", 40, UDP),
        ]
    )
    assert parse_survey(data) == Survey(
        processes=(
            GuestProcess(name="nginx", argv=("nginx:", "worker"), user="web"),
            GuestProcess(name="prog", argv=("left",), user="77"),
            GuestProcess(
                name="httpd", argv=("httpd", "-f", "-p", "8000"), user="root", service="web",
                count=2,
            ),
        ),
        ports=(
            GuestPort(protocol="tcp", address="0.0.0.0", port=22, process="nginx"),
            GuestPort(
                protocol="tcp", address="127.0.0.1", port=8000, process="httpd", service="web"
            ),
            GuestPort(protocol="tcp", address="::1", port=8080),
            GuestPort(protocol="udp", address="0.0.0.0", port=53),
        ),
    )  # fmt: skip


def test_a_service_is_known_by_its_parents_where_there_are_no_control_groups() -> None:
    data = b"".join(
        [
            record("first", 10, "service:web"),
            process(10, "sh", parent=1),
            process(11, "worker", parent=10),
            process(12, "other", parent=1),
        ]
    )
    found = {each.argv[0]: each.service for each in parse_survey(data).processes}
    assert found == {"sh": "web", "worker": "web", "other": ""}


def test_parents_in_a_circle_end() -> None:
    data = process(10, "a", parent=11) + process(11, "b", parent=10)
    assert len(parse_survey(data).processes) == 2


def test_of_many_arguments_the_first_are_kept_and_foreign_bytes_replaced() -> None:
    data = record("cmdline", 5, b"\xff" + b"\0y" * 500)
    (found,) = parse_survey(data).processes
    assert found.argv[:2] == ("\N{REPLACEMENT CHARACTER}", "y")
    assert len(found.argv) == 64


def test_an_argument_that_the_agent_cut_is_left_out() -> None:
    data = record("cmdline", 5, b"prog\0" + b"x" * (16384 - 5))
    (found,) = parse_survey(data).processes
    assert found.argv == ("prog",)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"cmdline 1\nx",
        b"cmdline 1 5\nabc",
        b"cmdline -1 0\n",
        b"cmdline 1 99999999999\n",
        process(5, "x") + b"\n",
    ],
)
def test_malformed_records_are_an_error(data: bytes) -> None:
    with pytest.raises(MachineError, match="malformed"):
        parse_survey(data)


kinds = st.sampled_from(
    ["cmdline", "status", "cgroup", "sockets", "tcp", "tcp6", "udp", "passwd", "job", "first", "?"]
)
contents = st.binary(max_size=80) | st.sampled_from([TCP.encode(), UDP.encode(), PASSWD.encode()])


@given(st.lists(st.tuples(kinds, st.integers(0, 5), contents), max_size=12))
def test_whatever_a_guest_says_is_read_or_refused(said: list[tuple[str, int, bytes]]) -> None:
    data = b"".join(record(kind, number, content) for kind, number, content in said)
    try:
        survey = parse_survey(data)
    except MachineError:
        assert any(kind == "?" for kind, _, _ in said)
        return
    assert len(survey.processes) <= 6


@given(st.binary(max_size=60))
def test_junk_is_no_survey(data: bytes) -> None:
    if data:
        with pytest.raises(MachineError):
            parse_survey(data)
    else:
        assert parse_survey(data) == Survey()
