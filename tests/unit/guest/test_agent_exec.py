"""Executions of the real agent, outside a machine."""

import contextlib
import io
import os
import threading
from pathlib import Path

import pytest

from smolbuild.core.errors import MachineError
from smolbuild.machine.base import ExecRequest, ExecResult, Freshen
from smolbuild.machine.channel import AgentChannel
from smolbuild.machine.wire import Op, text, u32


def run(channel: AgentChannel, *argv: str, **options: object) -> tuple[ExecResult, bytes, bytes]:
    output: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    def collect(stream: str, data: bytes) -> None:
        output[stream] += data

    result = channel.exec(ExecRequest(argv=argv, **options), collect)  # type: ignore[arg-type]
    return result, output["stdout"], output["stderr"]


def test_output_and_status_come_back(channel: AgentChannel) -> None:
    result, out, err = run(channel, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (result.status, result.timed_out, out, err) == (7, False, b"out\n", b"err\n")


def test_a_signal_is_128_plus_its_number(channel: AgentChannel) -> None:
    assert run(channel, "sh", "-c", "kill -TERM $$")[0].status == 128 + 15


@pytest.mark.parametrize(("argv", "status"), [("no-such-program", 127), ("/etc", 126)])
def test_what_cannot_run_says_so_as_a_shell_does(
    channel: AgentChannel, argv: str, status: int
) -> None:
    result, _, err = run(channel, argv)
    assert result.status == status
    assert argv.encode() in err


def test_environment_is_exactly_what_was_given_besides_the_defaults(channel: AgentChannel) -> None:
    _, out, _ = run(channel, "env", env=(("A", "x y"), ("EMPTY", ""), ("PATH", "/usr/bin:/bin")))
    names = dict(line.split("=", 1) for line in out.decode().splitlines())
    assert names.pop("HOME")
    assert names == {"A": "x y", "EMPTY": "", "PATH": "/usr/bin:/bin"}


def test_working_directory(channel: AgentChannel) -> None:
    assert run(channel, "pwd", workdir="/usr")[1] == b"/usr\n"
    result, _, err = run(channel, "pwd", workdir="/no/such")
    assert result.status == 126
    assert b"/no/such" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_users_are_looked_up_in_the_guests_files(channel: AgentChannel) -> None:
    assert run(channel, "id", "-un", user="daemon")[1] == b"daemon\n"
    assert run(channel, "sh", "-c", "id -u; id -g", user="12345:6")[1] == b"12345\n6\n"
    result, _, err = run(channel, "id", user="nobody-at-all")
    assert result.status == 126
    assert b"nobody-at-all" in err


@pytest.mark.parametrize("size", [1, 65536, 3_000_001])
def test_stdin_streams_through_whatever_its_size(channel: AgentChannel, size: int) -> None:
    data = os.urandom(size)
    assert run(channel, "cat", stdin=data)[1] == data
    assert run(channel, "cat", stdin=io.BytesIO(data))[1] == data


def test_stdin_that_nobody_reads_does_not_hang(channel: AgentChannel) -> None:
    assert run(channel, "true", stdin=b"x" * 3_000_000)[0].status == 0


def test_a_slow_reader_loses_nothing(channel: AgentChannel) -> None:
    seen = 0
    pause = threading.Event()

    def slowly(_stream: str, data: bytes) -> None:
        nonlocal seen
        if not seen:
            pause.wait(0.3)  # longer than the process lives: more is ready than one window holds
        seen += len(data)

    channel.exec(ExecRequest(argv=("head", "-c", "2000000", "/dev/zero")), slowly)
    assert seen == 2_000_000


def test_the_deadline_kills_the_whole_tree(channel: AgentChannel) -> None:
    result, out, _ = run(channel, "sh", "-c", "echo begun; sleep 987 & sleep 987", timeout=0.3)
    assert result.timed_out
    assert result.status == 137
    assert out == b"begun\n"
    assert not _alive("987")


def test_background_processes_end_with_their_execution(channel: AgentChannel) -> None:
    assert run(channel, "sh", "-c", "sleep 986 & echo ok")[1] == b"ok\n"
    assert not _alive("986")


def test_an_id_names_one_execution_for_ever(channel: AgentChannel) -> None:
    first = run(channel, "sh", "-c", "exit 5", exec_id="once")[0]
    again, out, _ = run(channel, "sh", "-c", "echo ran again", exec_id="once")
    assert (first.status, again.status, out) == (5, 5, b"")


def test_asking_for_a_running_id_attaches(channel: AgentChannel) -> None:
    began = threading.Event()
    first: list[object] = []

    def watch() -> None:
        try:
            channel.exec(
                ExecRequest(argv=("sh", "-c", "echo a; sleep 1; echo b; exit 4"), exec_id="long"),
                lambda _stream, _data: began.set(),
            )
        except MachineError as error:
            first.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert began.wait(10)
    result, out, _ = run(channel, "false", exec_id="long")
    watcher.join(10)
    assert (result.status, out) == (4, b"b\n")
    assert "attached" in str(first[0])


def test_leaving_early_kills(channel: AgentChannel) -> None:
    def refuse(_stream: str, _data: bytes) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        channel.exec(ExecRequest(argv=("sh", "-c", "echo x; sleep 985")), refuse)
    assert run(channel, "true")[0].status == 0
    assert not _alive("985")


def test_a_service_lives_on_and_its_last_output_is_kept(channel: AgentChannel) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo last; read never"
    request = ExecRequest(argv=("sh", "-c", script + "; sleep 984"), exec_id="web", keep=True)
    assert channel.exec(request).status == 0
    assert channel.exec(request).status == 0  # started already: nothing happens
    assert run(channel, "sleep", "0.2")[0].status == 0
    assert channel.service_status("web") is None
    output = channel.service_output("web")
    assert len(output) == 65536
    assert output.endswith(b"x\nlast\n")
    channel.kill("web", 0)
    assert run(channel, "sleep", "0.1")[0].status == 0
    ended = channel.service_status("web")
    assert ended is not None
    assert ended.status == 137
    assert channel.service_output("web").endswith(b"last\n")


def test_a_signal_reaches_the_first_process(channel: AgentChannel) -> None:
    script = "trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    channel.exec(ExecRequest(argv=("sh", "-c", script), exec_id="s", keep=True))
    while b"ready" not in channel.service_output("s"):
        pass
    channel.kill("s", 10)
    while (ended := channel.service_status("s")) is None:
        pass
    assert ended.status == 9
    assert channel.service_output("s") == b"ready\ncaught\n"


def test_unknown_ids_are_refused(channel: AgentChannel) -> None:
    with pytest.raises(MachineError, match="no execution") as caught:
        channel.service_status("never")
    assert caught.value.code == "agent-unknown"


def test_malformed_requests_are_refused(channel: AgentChannel) -> None:
    for request in (
        ExecRequest(argv=()),
        ExecRequest(argv=("true",), exec_id="x" * 65),
        ExecRequest(argv=("true",) * 5000),
    ):
        with pytest.raises(MachineError) as caught:
            channel.exec(request)
        assert caught.value.code == "agent-bad-request"
    with pytest.raises(MachineError, match="NUL"):
        channel.exec(ExecRequest(argv=("echo", "a\0b")))
    with pytest.raises(MachineError, match="too large"):
        channel.exec(ExecRequest(argv=("echo", "x" * 300_000)))
    channel.ping()


def test_many_executions_at_once(channel: AgentChannel) -> None:
    seen: dict[int, bytes] = {}

    def one(number: int) -> None:
        seen[number] = run(channel, "sh", "-c", f"sleep 0.05; echo {number}")[1]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {number: b"%d\n" % number for number in range(40)}


def test_an_ordinary_program_never_touches_its_host(channel: AgentChannel) -> None:
    calls = (
        lambda: channel.freshen(Freshen(hostname="x", machine_id="0" * 32)),
        channel.freeze,
        channel.thaw,
        channel.sync,
        channel.shutdown,
    )
    for call in calls:
        with pytest.raises(MachineError) as caught:
            call()
        assert caught.value.code == "agent-not-a-guest"


def _alive(seconds: str) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes() == b"sleep\0" + seconds.encode() + b"\0":
                return True
    return False


def test_secrets_and_zeroing_are_for_guests_only(channel: AgentChannel) -> None:
    """They are understood; a program of the host must not mount or zero anything."""
    for ask in (
        lambda: channel.give_secrets({"TOKEN": b"value \0 with a NUL", "_2": b""}, "root"),
        channel.take_secrets,
        lambda: channel.zero_free([(0, 4096), (8192, 4096)]),
    ):
        with pytest.raises(MachineError) as raised:
            ask()
        assert raised.value.code == "agent-not-a-guest"


def test_a_secret_cannot_be_a_path(channel: AgentChannel) -> None:
    for name in ("../x", "a/b", "", "1", ".", "a" * 200):
        with pytest.raises(MachineError) as raised:
            channel._connection.call(
                "secrets",
                Op.SECRETS,
                u32(1000) + b"\1" + text("root") + u32(1) + text(name) + u32(1) + b"v",
                10,
            )
        assert raised.value.code == "agent-bad-request"
