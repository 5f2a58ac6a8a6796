"""The survey of the real agent: this host's own processes and sockets."""

import sys
from pathlib import Path

from smolbuild.machine.base import ExecRequest
from smolbuild.machine.channel import AgentChannel
from smolbuild.model.smolfile import FileProbe

LISTEN = """\
import os, signal, socket, sys
one = socket.create_server(("127.0.0.1", 0))
two = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
two.bind(("127.0.0.1", 0))
with open(sys.argv[1] + ".new", "w") as file:
    print(one.getsockname()[1], two.getsockname()[1], file=file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""


def test_a_service_and_its_ports_are_found(channel: AgentChannel, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    request = ExecRequest(
        argv=(sys.executable, "-c", LISTEN, str(ready)),
        exec_id="service:listener",
        env=(("IN_THE_ENVIRONMENT", "of-nobodys-business"),),
        keep=True,
        workdir="/tmp",
    )
    channel.exec(request)
    try:
        assert channel.probe_until(FileProbe(path=str(ready)), deadline=20).ok
        survey = channel.survey()
    finally:
        channel.kill("service:listener")
    ours = [each for each in survey.processes if each.service == "listener"]
    assert [each.argv[-1] for each in ours] == [str(ready)]
    said = ready.read_text().split()
    ports = {(each.protocol, each.port) for each in survey.ports if each.service == "listener"}
    assert ports == {("tcp", int(said[0])), ("udp", int(said[1]))}
    assert "of-nobodys-business" not in repr(survey)
    assert not any(each.argv[0].endswith("agent") for each in ours)


def test_a_survey_after_another_one(channel: AgentChannel) -> None:
    first, second = channel.survey(), channel.survey()
    assert first.processes
    assert {each.name for each in second.processes} & {each.name for each in first.processes}
