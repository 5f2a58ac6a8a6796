"""What a build keeps after a step: the machine where it may, the disk else, and no secret."""

from types import SimpleNamespace

import pytest

from smolbuild.build.cache import StepCache, lineage_of
from smolbuild.build.keep import Keeper
from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import HostError
from smolbuild.machine.base import BootSpec, Disk
from smolbuild.machine.fake import FakeEngine, FakeMachine
from smolbuild.model.contract import Shape

BASE = digest_bytes(b"base")
CHAIN = tuple(digest_bytes(b"link %d" % n) for n in range(4))
SHAPE = Shape(cpus=1, memory_mib=4, disk_bytes=16 << 20)


@pytest.fixture
def world(tmp_path):
    """Give a machine, and a keeper whose gate says what ``dirty`` holds of overlay and memory."""
    (tmp_path / "base").write_bytes(bytes(4096))
    machine = FakeEngine(tmp_path / "machines").boot(
        BootSpec(
            kernel=tmp_path,
            initrd=tmp_path,
            disk=Disk(base=tmp_path / "base"),
            shape=SHAPE,
        )
    )
    dirty: set[str] = set()
    gate = SimpleNamespace(is_clean=lambda **media: not dirty & media.keys())
    smolfile = SimpleNamespace(resume="memory", guarded=False)
    plan = SimpleNamespace(smolfile=smolfile, shape=SHAPE, chain=CHAIN, name="a")
    said = []
    work = tmp_path / "work"
    work.mkdir()
    with StepCache(tmp_path / "cache") as cache:
        keeper = Keeper(cache, plan, gate, below=lineage_of(BASE), work=work, emit=said.append)
        turn = iter(range(len(CHAIN)))

        def keep():
            link = next(turn)
            run = keeper.keep(machine, link, f"step {link}", ())
            cache.settle()
            return run

        yield SimpleNamespace(
            keep=keep,
            machine=machine,
            dirty=dirty,
            smolfile=smolfile,
            said=said,
            kept=lambda: [step.memory is not None for step in cache.prefix(CHAIN, BASE)],
            steps=tmp_path / "cache" / "steps",
        )


def test_each_link_is_kept_on_the_one_before_with_its_machine(world):
    runs = [world.keep() for _ in CHAIN]
    assert world.kept() == [True] * len(CHAIN)
    assert [run.entry.below for run in runs[1:]] == [run.entry.token for run in runs[:-1]]
    assert all(run.overlay.exists() for run in runs)
    assert world.said == []


def test_only_disks_are_kept_where_that_is_asked_for(world):
    world.smolfile.resume = "disk"
    world.keep()
    assert world.kept() == [False]


def test_a_machine_with_much_memory_in_use_is_not_saved_and_that_is_said_once(world, monkeypatch):
    world.keep()
    monkeypatch.setattr(FakeMachine, "memory_in_use", lambda _: 3 << 30)
    world.keep()
    world.keep()
    assert world.kept() == [True, False, False]
    (message,) = world.said
    assert "3.2 GB" in message.text


def test_no_space_for_the_memory_keeps_the_disk(world, monkeypatch):
    def refuse(self, directory):
        (directory / "memory").write_bytes(b"half")
        raise HostError("no space left")

    monkeypatch.setattr(FakeMachine, "snapshot", refuse)
    run = world.keep()
    assert world.kept() == [False]
    assert sorted(path.name for path in run.entry.path.iterdir()) == ["disk.qcow2", "entry.json"]
    assert "no space left" in world.said[0].text


def test_memory_with_a_secret_is_not_kept_and_the_disk_is(world):
    world.keep()
    world.dirty.add("memory")
    run = world.keep()
    world.dirty.clear()
    world.keep()
    assert world.kept() == [True, False, True]
    assert sorted(path.name for path in run.entry.path.iterdir()) == ["disk.qcow2", "entry.json"]


def test_a_disk_with_a_secret_ends_the_chain(world):
    world.keep()
    world.dirty.add("overlay")
    assert world.keep().entry is None
    world.dirty.clear()
    run = world.keep()  # it lies on a disk that is not kept
    assert run.entry is None
    assert run.overlay.exists()
    assert world.kept() == [True]
    assert len(list(world.steps.iterdir())) == 1
    assert ["secret" in message.text for message in world.said] == [True]
