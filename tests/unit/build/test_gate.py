"""The restore proof, and the fork that it and every worker make, over an engine without guests."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from smolbuild.attempt.run import run_forks
from smolbuild.build.gate import prove_restore
from smolbuild.build.pack import (
    Overlay,
    encode_agent_cursor,
    pack_artifact,
    pack_streams,
    shipped_deltas,
)
from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import HealthError, MachineError
from smolbuild.core.events import silent
from smolbuild.machine import fake
from smolbuild.machine.base import BootSpec, Disk, ExecRequest
from smolbuild.machine.fake import FAKE_CONTRACT, FakeEngine, FakeMachine
from smolbuild.machine.fork import restore_fork
from smolbuild.model.contract import Shape
from smolbuild.model.smolfile import Health, PortProbe, RestoreContract, Service
from smolbuild.store.layout import Store
from smolbuild.store.materialise import materialise

SHAPE = Shape(cpus=1, memory_mib=64, disk_bytes=64 << 20)


@pytest.fixture
def world(tmp_path, config_for):
    """Give an engine, and the files and config of a machine that was saved with a live service."""
    answers = SimpleNamespace(exec=lambda _: (0, b"", b""), probe=lambda _: True)

    def on_exec(argv):
        return answers.exec(argv)  # looked up anew: a test may change it

    def on_probe(probe):
        return answers.probe(probe)

    engine = FakeEngine(tmp_path / "machines", on_exec=on_exec, on_probe=on_probe)
    base, kernel, initrd = (tmp_path / name for name in ("base", "kernel", "initrd"))
    with base.open("wb") as stream:
        stream.truncate(SHAPE.disk_bytes)
    kernel.write_bytes(b"KERNEL")
    initrd.write_bytes(b"INITRD")
    machine = engine.boot(BootSpec(kernel=kernel, initrd=initrd, disk=Disk(base=base), shape=SHAPE))
    machine.exec(ExecRequest(argv=("web",), exec_id="service:web", keep=True))
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint = machine.checkpoint(saved)
    store = Store(tmp_path / "store")
    streams = pack_streams(
        store,
        base=base,
        base_digest=digest_bytes(b"base"),
        deltas=shipped_deltas(
            [Overlay(step="services", path=checkpoint.disk_overlay)], only_seen=False
        ),
        checkpoint=checkpoint,
        kernel=kernel,
        initrd=initrd,
        cache=tmp_path / "cache",
        emit=silent,
    )
    machine.discard()
    config = dataclasses.replace(
        config_for(streams, "acme/x"),
        contract=FAKE_CONTRACT,
        agent_cursor=encode_agent_cursor(checkpoint.agent_cursor),
        services=(Service(name="web", run="web"),),
        health=Health(probe=PortProbe(port=80), interval=0.0, retries=2),
    )
    artifact = pack_artifact(store, config, streams.layers)
    root = tmp_path / "materialised"
    root.mkdir()
    files = materialise(store, artifact, root, emit=silent)
    return SimpleNamespace(engine=engine, files=files, config=config, answers=answers)


def gone(world) -> bool:
    return all(machine.discarded for machine in world.engine.machines)


def test_two_different_healthy_forks_are_the_proof(world):
    before = len(world.engine.machines)
    first, second = prove_restore(world.engine, world.files, world.config)
    assert len(world.engine.machines) == before + 2
    assert first.machine_id != second.machine_id
    assert first.boot_id != second.boot_id
    assert first.random_sha256 != second.random_sha256
    assert gone(world)


def refused(world, **arguments) -> HealthError:
    with pytest.raises(HealthError) as caught:
        prove_restore(world.engine, world.files, world.config, **arguments)
    assert caught.value.code == "restore-proof"
    assert gone(world)
    return caught.value


def test_forks_that_resemble_each_other_are_refused(world, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fake, "_uuid", lambda: "11111111-1111-1111-1111-111111111111")
        assert "same boot id" in refused(world).message
    with monkeypatch.context() as patch:
        patch.setattr("smolbuild.machine.fork.secrets.token_hex", lambda size: "ab" * size)
        patch.setattr("smolbuild.machine.fake.secrets.token_hex", lambda size: "ab" * size)
        patch.setattr(fake, "private_directory", lambda path: path)
        assert "same machine id" in refused(world).message
    real = FakeMachine.identity
    with monkeypatch.context() as patch:
        patch.setattr(
            FakeMachine, "identity", lambda self: dataclasses.replace(real(self), random=bytes(32))
        )
        assert "same random" in refused(world).message


@pytest.mark.parametrize("off", [-3.0, 3.0])
def test_a_wrong_clock_is_refused(world, off):
    assert "clock" in refused(world, now=lambda: time.time() + off).message


def test_an_unhealthy_fork_is_refused(world):
    world.answers.probe = lambda _: False
    assert "health check failed 2 times" in refused(world).message


def test_a_checkpoint_that_does_not_restore_is_refused(world):
    world.files.state.write_bytes(b"damaged")
    assert "damaged" in refused(world).message


def with_hook(world):
    return dataclasses.replace(world.config, restore=RestoreContract(run=("renew",)))


def test_hooks_run_in_every_fork_before_its_health_check(world):
    asked = []
    world.answers.exec = lambda argv: (asked.append(argv), (0, b"", b""))[1]
    world.answers.probe = lambda _: (asked.append("health"), True)[1]
    restore_fork(world.engine, world.files, with_hook(world)).discard()
    assert asked == [("/bin/sh", "-c", "renew"), "health"]


def test_a_fork_whose_hook_fails_is_not_handed_out(world):
    world.answers.exec = lambda _: (3, b"x" * 200_000 + b"\nlast words", b"")
    with pytest.raises(HealthError, match="status 3") as caught:
        restore_fork(world.engine, world.files, with_hook(world))
    assert caught.value.code == "restore-hook"
    assert caught.value.details.endswith("last words")
    assert len(caught.value.details) <= 64 * 1024
    assert gone(world)


def test_each_fork_of_a_run_fails_alone_and_all_are_discarded(world):
    numbers = iter(range(100))

    def answer(_argv):
        if next(numbers) == 0:
            raise MachineError("it broke")
        return 7, b"out", b""

    world.answers.exec = answer
    heard = []
    attempts = run_forks(
        world.engine,
        world.files,
        world.config,
        count=3,
        argv=("task",),
        on_output=lambda number, stream, data: heard.append((number, stream, data)),
    )
    broken = [attempt for attempt in attempts if attempt.error is not None]
    assert [attempt.number for attempt in attempts] == [1, 2, 3]
    assert [attempt.status for attempt in broken] == [1]
    assert [attempt.status for attempt in attempts if attempt.error is None] == [7, 7]
    assert len(heard) == 2
    assert gone(world)
