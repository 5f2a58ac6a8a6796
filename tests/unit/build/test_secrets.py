"""Where values come from, what is refused, and that nothing tells a value."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from smolbuild.build.secrets import MAX_SECRET, Secrets
from smolbuild.core.errors import BuildError, MachineError, UsageError
from smolbuild.core.events import Message
from smolbuild.machine.base import BootSpec, Disk, Shape
from smolbuild.machine.fake import FakeEngine, FakeMachine
from smolbuild.model.inside import GuestProcess
from smolbuild.model.smolfile import SecretSource, Step

VALUE = "correct-horse-battery"


def secrets(
    directory: Path, environment: Mapping[str, str] | None = None, **sources: SecretSource
) -> Secrets:
    return Secrets(sources, environment=environment or {}, directory=directory)


def test_three_sources(tmp_path: Path) -> None:
    (tmp_path / "value").write_text(VALUE + "\n")
    command = (sys.executable, "-c", f"print('{VALUE}')")
    with secrets(
        tmp_path,
        {"HOST": VALUE},
        A=SecretSource(from_env="HOST"),
        B=SecretSource(from_file="value"),
        C=SecretSource(from_command=command),
    ) as found:
        values = [bytes(secret.value) for secret in found.of(("A", "B", "C"))]
    assert values == [VALUE.encode(), VALUE.encode() + b"\n", VALUE.encode()]


def test_a_value_is_read_once_and_wiped_at_the_end(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = f"open({str(count)!r}, 'a').write('x'); print('{VALUE}')"
    source = SecretSource(from_command=(sys.executable, "-c", script))
    with secrets(tmp_path, A=source) as found:
        (secret,) = found.of(("A",))
        found.of(("A", "A"))
        buffer = secret.value
        assert VALUE not in repr(secret) + str(secret) + f"{secret}"
    assert count.read_text() == "x"
    assert buffer == b""


def test_what_cannot_be_read_is_looked_for_once_unless_a_step_needs_it(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = f"open({str(count)!r}, 'a').write('x'); raise SystemExit(1)"
    source = SecretSource(from_command=(sys.executable, "-c", script))
    with secrets(tmp_path, {"B": VALUE}, A=source, B=SecretSource(from_env="B")) as found:
        for _ in range(3):
            assert [bytes(secret.value) for secret in found.readable()] == [VALUE.encode()]
        assert count.read_text() == "x"
        with pytest.raises(UsageError, match="ended with status 1"):
            found.of(("A",))
    assert count.read_text() == "xx"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SecretSource(from_env="MISSING"), "the variable MISSING is not set"),
        (SecretSource(from_env="EMPTY"), "is empty"),
        (SecretSource(from_env="SHORT"), "fewer than 8 bytes"),
        (SecretSource(from_env="PLAIN"), "hardly any different"),
        (SecretSource(from_file="missing"), "the file missing cannot be read"),
        (SecretSource(from_file="."), "no regular file"),
        (SecretSource(from_file="large"), "more than 65,536 bytes"),
        (SecretSource(from_command=("smolbuild-no-such-program",)), "is not installed"),
        (SecretSource(from_command=("false",)), "ended with status 1"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_without_its_value(
    tmp_path: Path, source: SecretSource, expected: str
) -> None:
    (tmp_path / "large").write_text("0123456789" * (MAX_SECRET // 10 + 1))
    host = {"EMPTY": " ", "SHORT": "sh0rt-x", "PLAIN": "a" * 40}
    with secrets(tmp_path, host, TOKEN=source) as found:
        with pytest.raises(UsageError, match=expected) as raised:
            found.of(("TOKEN",))
        assert "the secret TOKEN" in raised.value.message
        assert "sh0rt-x" not in raised.value.message
        assert found.readable() == ()


def test_a_failed_command_may_say_why_but_not_what(tmp_path: Path) -> None:
    script = f"import sys; print('{VALUE}'); sys.exit('no key for {VALUE}')"
    source = SecretSource(from_command=(sys.executable, "-c", script))
    with secrets(tmp_path, A=source) as found, pytest.raises(UsageError) as raised:
        found.of(("A",))
    assert raised.value.details == "no key for ***"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    base = tmp_path / "base"
    base.write_bytes(bytes(4096))
    spec = BootSpec(
        kernel=base,
        initrd=base,
        disk=Disk(base=base),
        shape=Shape(cpus=1, memory_mib=64, disk_bytes=1 << 30, network="none"),
    )
    return FakeEngine(tmp_path / "machines").boot(spec)


def test_the_machine_has_them_during_the_step_only(tmp_path: Path, machine: FakeMachine) -> None:
    step = Step(name="s", run="x", secrets=("A",))
    with secrets(tmp_path, {"A": VALUE}) as found:
        with found.given(machine, step):
            assert machine.secrets == {"A": VALUE.encode()}
        assert machine.secrets == {}
        with pytest.raises(BuildError), found.given(machine, step):
            raise BuildError("the step failed")
        assert machine.secrets == {}
        with pytest.raises(MachineError, match="ended"), found.given(machine, step):
            machine.discard()


def test_too_much_for_one_step(tmp_path: Path, machine: FakeMachine) -> None:
    names = tuple("ABCD")
    step = Step(name="s", run="x", secrets=names)
    host = dict.fromkeys(names, "0123456789" * 6000)
    with (
        secrets(tmp_path, host) as found,
        pytest.raises(UsageError, match="more than the"),
        found.given(machine, step),
    ):
        pass
    assert machine.secrets == {}


def test_errors_and_messages_are_masked(tmp_path: Path) -> None:
    said: list[object] = []
    with secrets(tmp_path, {"A": VALUE}) as found:
        found.of(("A",))
        found.masked(said.append)(Message(level="info", text=f"a {VALUE}"))
        with pytest.raises(BuildError) as raised, found.masked_errors():
            raise BuildError(f"m {VALUE}", hint=VALUE, details=VALUE.encode().hex())
    assert said == [Message(level="info", text="a ***")]
    error = raised.value
    assert (error.message, error.hint, error.details) == ("m ***", "***", "***")
    assert str(error) == "m ***"


def test_the_arguments_of_a_process_hold_no_secret_nor_half_of_one(tmp_path: Path) -> None:
    process = GuestProcess(
        name="api",
        argv=("api", f"--token={VALUE}", "x" * 500 + VALUE, "y" * 9000),
        user="root",
    )
    with secrets(tmp_path, {"HOST": VALUE}, A=SecretSource(from_env="HOST")) as found:
        (masked,) = found.mask_processes([process])
    assert VALUE[:5] not in repr(masked)
    assert masked.argv[1].startswith("--token=")
    assert max(map(len, masked.argv)) == 512
