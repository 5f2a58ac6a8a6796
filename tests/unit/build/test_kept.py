"""Machines of failed builds, kept and forked: with an engine that has no hypervisor."""

import dataclasses
import io
import tarfile

import pytest

from smolbuild.build.kept import Failed, KeptMachines, fork_kept, keep_machine, offered
from smolbuild.cli.failing import on_disk
from smolbuild.core.errors import BuildError, MachineError, UsageError
from smolbuild.machine.base import BootSpec, Disk, Shape
from smolbuild.machine.fake import FakeEngine
from smolbuild.model.artifact import RunConfig
from smolbuild.model.smolfile import Network


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "machines").mkdir()
    return FakeEngine(tmp_path / "machines")


@pytest.fixture
def parts(tmp_path):
    for name in ("kernel", "initrd"):
        (tmp_path / name).write_bytes(name.encode())
    with (tmp_path / "base").open("wb") as stream:
        stream.truncate(1 << 20)
    return tmp_path


@pytest.fixture
def machine(engine, parts):
    made = engine.boot(
        BootSpec(
            kernel=parts / "kernel",
            initrd=parts / "initrd",
            disk=Disk(base=parts / "base"),
            shape=Shape(cpus=1, memory_mib=1, disk_bytes=1 << 20),
        )
    )
    yield made
    made.discard()


@pytest.fixture
def failed(parts):
    return Failed(
        name="acme/env",
        what="step two",
        command="make it",
        error=BuildError("step two ended with status 7"),
        kernel=parts / "kernel",
        initrd=parts / "initrd",
        shape=Shape(cpus=1, memory_mib=1, disk_bytes=1 << 20),
        run=RunConfig(env=(("A", "b"),), workdir="/w", user="web", entrypoint=(), cmd=()),
        network=Network(mode="allow", allow_hosts=("a.example.com",)),
        within=Network(mode="allow", allow_hosts=("b.example.com",)),
        guarded=False,
    )


def put(machine, name, data):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    machine.put([target.getvalue()], "/", timeout=1)


def get(machine, name):
    with tarfile.open(fileobj=io.BytesIO(b"".join(machine.get(f"/{name}", timeout=1)))) as tar:
        return tar.extractfile(tar.getmembers()[0]).read()


def test_forks_see_what_was_kept_and_not_each_other(engine, machine, failed, fresh_home):
    put(machine, "one", b"1")
    machine.snapshot_disk()
    put(machine, "two", b"2")
    kept = KeptMachines(fresh_home)
    record = kept.keep(machine, failed, now=0.0)
    machine.discard()  # nothing of its directory is needed
    assert kept.find("acme/env")[1] == record
    assert (record.what, record.created, record.overlays) == ("step two", "1970-01-01T00:00:00Z", 1)
    assert record.run == failed.run
    directory, record = kept.find(None)
    first, second = (fork_kept(engine, directory, record) for _ in range(2))
    put(first, "two", b"changed")
    assert (get(second, "one"), get(second, "two")) == (b"1", b"2")
    assert first.identity().machine_id != second.identity().machine_id
    third = fork_kept(engine, directory, record)
    assert get(third, "two") == b"2"


def test_one_machine_is_kept_of_each_name(engine, machine, failed, fresh_home):
    kept = KeptMachines(fresh_home)
    with pytest.raises(UsageError, match="no machine is kept"):
        kept.find(None)
    put(machine, "x", b"old")
    kept.keep(machine, failed, now=1.0)
    put(machine, "x", b"new")
    kept.keep(machine, failed, now=2.0)
    ((directory, record),) = kept.all()
    assert get(fork_kept(engine, directory, record), "x") == b"new"
    kept.keep(machine, dataclasses.replace(failed, name="other"), now=3.0)
    with pytest.raises(UsageError, match="several") as caught:
        kept.find(None)
    assert "acme/env, other" in caught.value.hint
    with pytest.raises(UsageError, match="no machine of third"):
        kept.find("third")
    assert (kept.drop("acme/env"), kept.drop("acme/env")) == (1, 0)
    assert [record.name for _, record in kept.all()] == ["other"]


@pytest.mark.parametrize("name", ["..", "../steps", ".", "", "a/../.."])
def test_no_name_leads_out_of_the_kept(machine, failed, fresh_home, name):
    KeptMachines(fresh_home).keep(machine, failed, now=1.0)
    assert KeptMachines(fresh_home).drop(name) == 0
    assert len(KeptMachines(fresh_home).all()) == 1


def test_what_cannot_be_kept_leaves_what_was_kept_before(machine, failed, fresh_home):
    kept = KeptMachines(fresh_home)
    kept.keep(machine, failed, now=1.0)
    machine.discard()
    with pytest.raises(MachineError):
        kept.keep(machine, failed, now=2.0)
    ((directory, record),) = kept.all()
    assert record.created.endswith(":01Z")
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    with pytest.raises(MachineError):
        keep_machine(machine, failed, directory.parent / "x", now=2.0)
    assert not (directory.parent / "x").exists()


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"formatVersion": 2}', b"\xff"])
def test_a_damaged_record_is_none(machine, failed, fresh_home, damage):
    kept = KeptMachines(fresh_home)
    kept.keep(machine, failed, now=1.0)
    ((directory, _),) = kept.all()
    (directory / "kept.json").write_bytes(damage)
    assert kept.all() == ()
    assert kept.drop("acme/env") == 1


def test_a_machine_is_offered_only_on_failure(machine, failed):
    seen = []

    def look(offer, error):
        seen.append((offer, error))

    def describe(error):
        return dataclasses.replace(failed, error=error)

    with offered(machine, look, describe):
        pass
    assert seen == []
    error = BuildError("it failed")
    with pytest.raises(BuildError, match="it failed"), offered(machine, look, describe):
        raise error
    assert seen == [(machine, describe(error))]
    with pytest.raises(KeyboardInterrupt), offered(machine, look, describe):
        raise KeyboardInterrupt
    with pytest.raises(BuildError), offered(machine, None, describe):
        raise error
    assert len(seen) == 1


class World:
    """What ``on_disk`` takes of a build's context."""

    def __init__(self, home):
        self.home = home
        self.said = []
        self.emit = self.said.append

    def now(self):
        return 5.0


def test_a_machine_that_secrets_passed_through_is_not_put_on_the_disk(machine, failed, fresh_home):
    world = World(fresh_home)
    on_disk(world, machine, dataclasses.replace(failed, guarded=True))
    assert KeptMachines(fresh_home).all() == ()
    assert [(event.level, "secrets" in event.text) for event in world.said] == [("warning", True)]
    on_disk(world, machine, failed)
    assert len(KeptMachines(fresh_home).all()) == 1
    assert "smolbuild debug acme/env" in world.said[1].text


def test_that_it_cannot_be_kept_is_a_warning(machine, failed, fresh_home):
    world = World(fresh_home)
    machine.discard()
    on_disk(world, machine, failed)
    assert [event.level for event in world.said] == ["warning"]


def test_the_error_of_a_build_with_secrets_is_not_recorded(machine, failed, tmp_path):
    guarded = dataclasses.replace(failed, guarded=True)
    assert keep_machine(machine, guarded, tmp_path / "k", now=1.0).error == ""
