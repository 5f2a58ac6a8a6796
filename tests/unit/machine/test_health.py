"""Readiness and health: upstream's counting of failures, and what is said when it is enough."""

import pytest

from smolbuild.core.errors import HealthError
from smolbuild.machine import health as health_module
from smolbuild.machine.base import ExecResult, ProbeResult
from smolbuild.machine.health import await_ready, check_health, check_still_ready
from smolbuild.model.artifact import RunConfig
from smolbuild.model.smolfile import ExecProbe, Health, PortProbe, Service

RUN = RunConfig(env=(("A", "b"),), workdir="/", user="root", entrypoint=(), cmd=())
PORT = PortProbe(port=80)
WEB = Service(name="web", run="web", ready=PORT, ready_timeout=5.0)


class Clock:
    """Time that moves when somebody sleeps or probes."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Machine:
    """Answers probes from a list, the last answer for ever; each takes a second."""

    def __init__(self, clock: Clock, *answers: bool, ended: ExecResult | None = None) -> None:
        self.clock, self.answers, self.ended = clock, list(answers), ended
        self.probes = []

    def probe(self, probe, *, timeout, env=()):
        self.probes.append((self.clock.now, timeout, env))
        self.clock.now += 1
        ok = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return ProbeResult(ok=ok, detail="seen" if ok else "not seen", seconds=1.0)

    def probe_until(self, probe, *, deadline, interval):
        return self.probe(probe, timeout=deadline)

    def service_status(self, exec_id):
        assert exec_id == "service:web"
        return self.ended

    def service_output(self, exec_id):
        return b"last words\n"

    def console(self):
        return "kernel says\n"


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(health_module, "time", made)
    return made


def test_health_ends_with_the_first_success(clock):
    machine = Machine(clock, False, False, True)
    report = check_health(machine, Health(probe=PORT, interval=2.0, timeout=3.0, retries=3), RUN)
    assert (report.attempts, report.detail) == (3, "seen")
    assert [(at, timeout) for at, timeout, _ in machine.probes] == [(0, 3.0), (3, 3.0), (6, 3.0)]
    assert all(env == RUN.env for *_, env in machine.probes)


def test_as_many_failures_as_retries_are_enough(clock):
    machine = Machine(clock, False)
    with pytest.raises(HealthError, match="3 times in a row") as caught:
        check_health(machine, Health(probe=PORT, interval=0.0, retries=3), RUN, (WEB,))
    assert len(machine.probes) == 3
    assert caught.value.code == "unhealthy"
    for words in ("last words", "kernel says"):
        assert words in caught.value.details


def test_failures_inside_the_grace_do_not_count(clock):
    machine = Machine(clock, False)
    health = Health(probe=PORT, interval=1.0, startup_grace=10.0, retries=2)
    with pytest.raises(HealthError):
        check_health(machine, health, RUN)
    assert [at for at, *_ in machine.probes] == [0, 2, 4, 6, 8, 10, 12]


def test_no_retries_means_one_attempt(clock):
    machine = Machine(clock, False)
    with pytest.raises(HealthError):
        check_health(machine, Health(probe=PORT, retries=0), RUN)
    assert len(machine.probes) == 1


@pytest.mark.parametrize("probe", [PORT, ExecProbe(argv=("ready",))])
def test_a_service_is_awaited_until_its_probe_passes(clock, probe):
    machine = Machine(clock, False, False, True)
    service = Service(name="web", run="web", ready=probe, ready_timeout=60.0)
    assert await_ready(machine, service, RUN) >= 3000


def test_a_service_that_is_never_ready_is_told_with_its_output(clock):
    with pytest.raises(HealthError, match="not ready within 5 s") as caught:
        await_ready(Machine(clock, False), WEB, RUN)
    assert caught.value.code == "not-ready"
    assert "last words" in caught.value.details
    assert clock.now <= 7


def test_a_service_that_ended_is_not_waited_for(clock):
    machine = Machine(clock, True, ended=ExecResult(exec_id="service:web", status=127))
    with pytest.raises(HealthError, match="status 127") as caught:
        await_ready(machine, WEB, RUN)
    assert caught.value.code == "service-ended"
    assert machine.probes == []


def test_what_was_ready_must_still_be(clock):
    check_still_ready(Machine(clock, True), WEB, RUN)
    check_still_ready(Machine(clock, False), Service(name="web", run="web"), RUN)
    with pytest.raises(HealthError, match="no more") as caught:
        check_still_ready(Machine(clock, False), WEB, RUN)
    assert "last words" in caught.value.details
