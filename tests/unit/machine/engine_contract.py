"""What every engine must do: run for the fake by unit tests, for QEMU by the tests in tests/vm.

A subclass gives the fixtures ``engine``, ``spec`` (a BootSpec whose guest has a shell), ``booted``
(a machine that booted), ``machine`` (any that runs) and ``saved`` (what ``checkpoint_of`` gave).
"""

import dataclasses
import io
import shutil
import tarfile
import time

import pytest

from smolbuild.core.errors import MachineError
from smolbuild.machine.base import Disk, ExecRequest, Freshen, RestoreSpec
from smolbuild.model.smolfile import ExecProbe, FileProbe
from smolbuild.store.qcow2 import clusters, virtual_size


def sh(script, **more):
    return ExecRequest(argv=("/bin/sh", "-c", script), timeout=30.0, **more)


def tar_of(files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o640
            tar.addfile(member, io.BytesIO(content))
    return [data.getvalue()]


def files_in(archive):
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
        return {m.name: (m.mode, tar.extractfile(m).read()) for m in tar if m.isfile()}


def restore_spec(spec, saved, overlays=()):
    return RestoreSpec(
        kernel=spec.kernel,
        initrd=spec.initrd,
        disk=Disk(base=spec.disk.base, overlays=(*overlays, saved.disk_overlay)),
        shape=spec.shape,
        memory=saved.memory,
        state=saved.state,
        contract=saved.contract,
        agent_cursor=saved.agent_cursor,
    )


def checkpoint_of(machine, directory):
    """Save a machine with a file and a living service."""
    machine.put(tar_of({"state": b"before"}), "/srv", timeout=20)
    machine.exec(sh("exec sleep 1000", exec_id="service:kept", keep=True))
    return machine.checkpoint(directory)


def copy_of(saved, directory):
    """Return the checkpoint as files elsewhere."""
    names = ("memory", "state", "disk_overlay")
    paths = {name: directory / f"copied-{name}" for name in names}
    for name, path in paths.items():
        shutil.copy(getattr(saved, name), path)
    return dataclasses.replace(saved, **paths)


class EngineContract:
    """Tests that both engines pass."""

    def test_boot_says_how_long_it_took(self, booted):
        assert list(booted.milestones) == ["spawned", "greeting", "agent"]
        assert 0 <= booted.milestones["greeting"] <= booted.milestones["agent"]

    def test_exec_streams_output_and_gives_the_status(self, machine):
        seen = []
        result = machine.exec(
            sh("echo out; echo err >&2; exit 7"), lambda name, data: seen.append((name, data))
        )
        assert (result.status, result.timed_out) == (7, False)
        assert b"".join(d for n, d in seen if n == "stdout") == b"out\n"
        assert b"".join(d for n, d in seen if n == "stderr") == b"err\n"

    def test_an_exec_id_names_one_execution(self, machine):
        first = machine.exec(sh("echo once >> /tmp/count; exit 3", exec_id="only"))
        again = machine.exec(sh("echo once >> /tmp/count; exit 3", exec_id="only"))
        assert first == again
        assert first.status == 3

    def test_services_live_on(self, machine):
        machine.exec(sh("echo ready; exec sleep 1000", exec_id="service:alive", keep=True))
        machine.exec(sh("exit 9", exec_id="service:dead", keep=True))
        deadline = time.monotonic() + 20
        while (ended := machine.service_status("service:dead")) is None:
            assert time.monotonic() < deadline
        assert ended.status == 9
        assert machine.service_status("service:alive") is None
        while machine.service_output("service:alive") != b"ready\n":
            assert time.monotonic() < deadline
        with pytest.raises(MachineError):
            machine.service_status("service:unknown")

    def test_a_survey_finds_what_a_service_runs(self, machine):
        machine.exec(sh("exec sleep 1000", exec_id="service:seen", keep=True))
        machine.exec(sh("true"))
        processes = machine.survey().processes
        assert [each.user for each in processes if each.service == "seen"] == ["root"]
        assert not any("agent" in each.name for each in processes)

    def test_files_go_in_and_come_out(self, machine):
        machine.put(tar_of({"deep/er/file": b"content"}), "/srv/put", timeout=20)
        assert files_in(machine.get("/srv/put/deep", timeout=20)) == {
            "deep/er/file": (0o640, b"content")
        }
        assert machine.probe(FileProbe(path="/srv/put/deep/er/file"), timeout=5).ok
        missing = machine.probe(FileProbe(path="/srv/none"), timeout=5)
        assert not missing.ok
        assert missing.detail
        with pytest.raises(MachineError):
            b"".join(machine.get("/srv/none", timeout=20))

    def test_exec_probe(self, machine):
        assert machine.probe(ExecProbe(argv=("/bin/sh", "-c", "exit 0")), timeout=20).ok
        assert not machine.probe(ExecProbe(argv=("/bin/sh", "-c", "exit 4")), timeout=20).ok

    def test_identity_has_fresh_random_bytes(self, machine):
        one, two = machine.identity(), machine.identity()
        assert one.random != two.random
        assert len(one.random) == 32
        assert one.boot_id == two.boot_id

    def test_a_finished_layer_boots_again(self, engine, spec, booted):
        booted.put(tar_of({"layer": b"one"}), "/srv", timeout=20)
        one = booted.snapshot_disk()
        booted.put(tar_of({"layer2": b"two"}), "/srv", timeout=20)
        two = booted.snapshot_disk()
        assert one != two
        for layer in (one, two):
            assert virtual_size(layer) == spec.shape.disk_bytes
            assert any(extent.kind == "data" for extent in clusters(layer))
        layered = type(spec)(
            kernel=spec.kernel,
            initrd=spec.initrd,
            disk=Disk(base=spec.disk.base, overlays=(one, two)),
            shape=spec.shape,
        )
        other = engine.boot(layered)
        try:
            found = files_in(other.get("/srv", timeout=20))
            assert found["srv/layer"][1] == b"one"
            assert found["srv/layer2"][1] == b"two"
        finally:
            other.discard()

    def test_forks_share_a_checkpoint_and_differ(self, engine, spec, saved, tmp_path):
        assert saved.contract == engine.contract()
        assert saved.memory.stat().st_size == spec.shape.memory_mib << 20
        moved = copy_of(saved, tmp_path)
        forks = [engine.restore(restore_spec(spec, moved)) for _ in range(2)]
        try:
            seen = [
                fork.freshen(Freshen(hostname=f"fork-{n}", machine_id=f"{n:032x}"))
                for n, fork in enumerate(forks)
            ]
            assert [i.machine_id for i in seen] == [f"{n:032x}" for n in range(2)]
            assert len({i.boot_id for i in seen}) == 2
            assert len({i.random for i in seen}) == 2
            assert all(abs(i.clock - time.time()) < 2 for i in seen)
            assert all(fork.service_status("service:kept") is None for fork in forks)
            forks[0].put(tar_of({"state": b"mine"}), "/srv", timeout=20)
            assert files_in(forks[1].get("/srv/state", timeout=20))["state"][1] == b"before"
            names = ["spawned", "greeting", "loaded", "running", "agent"]
            assert list(forks[0].milestones) == names
        finally:
            for fork in forks:
                fork.discard()

    def test_a_saved_machine_is_stopped(self, booted, tmp_path):
        saved = booted.checkpoint(tmp_path)
        assert {saved.memory.parent, saved.state.parent, saved.disk_overlay.parent} == {tmp_path}
        booted.discard()
        assert all(path.exists() for path in (saved.memory, saved.state, saved.disk_overlay))

    def test_a_snapshot_leaves_the_machine_running_and_can_be_gone_on_from(
        self, engine, spec, booted, tmp_path
    ):
        directories = [tmp_path / name for name in ("one", "two", "three")]
        for directory in directories:
            directory.mkdir()
        before = booted.identity()
        booted.exec(sh("exec sleep 1000", exec_id="service:kept", keep=True))
        booted.put(tar_of({"state": b"one"}), "/srv", timeout=20)
        one = booted.snapshot(directories[0])
        booted.put(tar_of({"state": b"two"}), "/srv", timeout=20)
        two = booted.snapshot(directories[1])
        assert files_in(booted.get("/srv/state", timeout=20))["state"][1] == b"two"
        after = booted.identity()
        assert (after.boot_id, after.machine_id) == (before.boot_id, before.machine_id)
        assert abs(after.clock - time.time()) < 2
        assert len(two.disk.overlays) == len(spec.disk.overlays) + 2
        below, top = two.disk.overlays[-2:]
        assert below.read_bytes() == one.disk_overlay.read_bytes()
        assert top == two.disk_overlay
        assert one.disk == Disk(
            base=spec.disk.base, overlays=(*spec.disk.overlays, one.disk_overlay)
        )
        booted.discard()

        gone_on = engine.restore(restore_spec(spec, one), own_memory=True)
        try:
            seen = gone_on.freshen(Freshen())
            assert (seen.boot_id, seen.machine_id) == (before.boot_id, before.machine_id)
            assert seen.random != after.random
            assert abs(seen.clock - time.time()) < 2
            assert gone_on.service_status("service:kept") is None
            assert files_in(gone_on.get("/srv/state", timeout=20))["state"][1] == b"one"
            gone_on.put(tar_of({"state": b"three"}), "/srv", timeout=20)
            three = gone_on.snapshot(directories[2])
            gone_on.put(tar_of({"state": b"four"}), "/srv", timeout=20)
            assert files_in(gone_on.get("/srv/state", timeout=20))["state"][1] == b"four"
        finally:
            gone_on.discard()
        for saved, below, content in (
            (two, (one.disk_overlay,), b"two"),
            (three, (one.disk_overlay,), b"three"),
            (one, (), b"one"),
        ):
            fork = engine.restore(restore_spec(spec, saved, below))
            try:
                assert files_in(fork.get("/srv/state", timeout=20))["state"][1] == content
                with pytest.raises(MachineError, match="shares its memory"):
                    fork.snapshot(tmp_path)
            finally:
                fork.discard()

    @pytest.mark.parametrize("field", ["engine_version", "cpu_model", "accelerator"])
    def test_contract_mismatch_starts_nothing(self, engine, spec, saved, field):
        other = dataclasses.replace(saved.contract, **{field: "something-else"})
        with pytest.raises(MachineError, match=r"fit") as caught:
            engine.restore(restore_spec(spec, dataclasses.replace(saved, contract=other)))
        assert caught.value.code == "contract"

    @pytest.mark.parametrize("part", ["memory", "state"])
    def test_truncated_checkpoint_is_an_error(self, engine, spec, saved, tmp_path, part):
        cut = copy_of(saved, tmp_path)
        path = getattr(cut, part)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        began = time.monotonic()
        with pytest.raises(MachineError):
            engine.restore(restore_spec(spec, cut), timeout=20)
        assert time.monotonic() - began < 22

    def test_a_discarded_machine_answers_nothing(self, machine):
        machine.discard()
        machine.discard()
        with pytest.raises(MachineError):
            machine.exec(sh("true"))

    def test_allow_takes_hosts_and_nothing(self, machine):
        machine.allow(("example.com", "*.example.org"), ("192.0.2.0/24",))
        machine.allow(None)
        machine.plug(connected=False)  # there is nothing to cut
        machine.plug(connected=True)
        assert machine.egress_records() == ()
