import pytest
from engine_contract import EngineContract, checkpoint_of, tar_of

from smolbuild.machine.base import BootSpec, Disk, ExecRequest, Shape
from smolbuild.machine.fake import FakeEngine
from smolbuild.model.smolfile import PortProbe
from smolbuild.store.qcow2 import clusters


def small_shell(argv):
    """Give what the contract's scripts would."""
    script = argv[-1]
    status = int(script.rpartition("exit ")[2]) if "exit " in script else 0
    out = b"out\n" if "echo out" in script else b"ready\n" if "echo ready" in script else b""
    return status, out, b"err\n" if "echo err" in script else b""


@pytest.fixture
def engine(tmp_path):
    return FakeEngine(tmp_path / "machines", on_exec=small_shell)


@pytest.fixture
def spec(tmp_path):
    base = tmp_path / "base.raw"
    with base.open("wb") as file:
        file.truncate(64 << 20)
    return BootSpec(
        kernel=tmp_path / "kernel",
        initrd=tmp_path / "initrd",
        disk=Disk(base=base),
        shape=Shape(cpus=1, memory_mib=16, disk_bytes=64 << 20),
    )


class TestFake(EngineContract):
    @pytest.fixture
    def booted(self, engine, spec):
        return engine.boot(spec)

    @pytest.fixture
    def machine(self, booted):
        return booted

    @pytest.fixture
    def saved(self, engine, spec, tmp_path):
        (tmp_path / "saved").mkdir()
        return checkpoint_of(engine.boot(spec), tmp_path / "saved")


def test_files_survive_on_a_flattened_disk(engine, spec, tmp_path):
    machine = engine.boot(spec)
    machine.put(tar_of({"a": b"x" * 200_000}), "/srv", timeout=1)
    (layer,) = [machine.snapshot_disk()]
    raw = tmp_path / "flat.raw"
    with raw.open("wb") as flat:
        flat.truncate(spec.shape.disk_bytes)
        for extent in clusters(layer):
            flat.seek(extent.guest_offset)
            flat.write(layer.read_bytes()[extent.host_offset :][: extent.length])
    other = engine.boot(
        BootSpec(kernel=spec.kernel, initrd=spec.initrd, disk=Disk(base=raw), shape=spec.shape)
    )
    assert b"x" * 200_000 in b"".join(other.get("/srv/a", timeout=1))
    assert len(engine.machines) == 2


def test_port_probes_pass_while_a_service_lives(engine, spec):
    machine = engine.boot(spec)
    assert not machine.probe(PortProbe(port=1), timeout=1).ok
    machine.exec(ExecRequest(argv=("api",), exec_id="service:api", keep=True))
    assert machine.probe(PortProbe(port=1), timeout=1).ok
    machine.end_service("service:api", 1)
    assert not machine.probe(PortProbe(port=1), timeout=1).ok
