"""Which network a step gets in which machine."""

import dataclasses
from pathlib import Path

import pytest

from smolbuild.machine.base import BootSpec, Disk, Shape
from smolbuild.machine.fake import FakeEngine, FakeMachine
from smolbuild.machine.network import let_through, proxy_env
from smolbuild.model.smolfile import Network

OFF, FULL = Network(), Network(mode="full")
LIST = Network(
    mode="allow",
    allow_hosts=("a.example.com", "192.0.2.1"),
    allow_host_patterns=("*.b.example.com",),
    allow_cidrs=("198.51.100.0/24",),
)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(1 << 20))
    shape = Shape(cpus=1, memory_mib=1, disk_bytes=1 << 20, network="none")
    spec = BootSpec(kernel=disk, initrd=disk, disk=Disk(base=disk), shape=shape)
    return FakeEngine(tmp_path / "machines").boot(spec)


def test_a_list_is_opened_with_the_subdomains(machine: FakeMachine) -> None:
    let_through(machine, LIST, within=LIST)
    hosts = ("a.example.com", "192.0.2.1", "*.a.example.com", "*.b.example.com")
    assert machine.allowed == (hosts, ("198.51.100.0/24",))
    own = dataclasses.replace(LIST, allow_hosts=("c.example.com",))
    let_through(machine, own, within=OFF)
    assert machine.allowed[0] is not None
    assert "*.c.example.com" in machine.allowed[0]


def test_a_step_without_network_has_none(machine: FakeMachine) -> None:
    let_through(machine, OFF, within=OFF)
    assert machine.allowed == (None, ())
    let_through(machine, OFF, within=LIST)  # what it asks for is denied, and noted
    assert machine.allowed == ((), ())
    let_through(machine, OFF, within=FULL)
    assert not machine.plugged
    let_through(machine, FULL, within=FULL)
    assert machine.plugged


def test_only_a_list_has_a_proxy() -> None:
    assert proxy_env(OFF) == proxy_env(FULL) == ()
    assert dict(proxy_env(LIST))["https_proxy"] == "http://127.0.0.1:3128"
