import json
from pathlib import Path

import pytest

from smolbuild.machine.command import Descriptors, Launch, command, cpu_option
from smolbuild.model.contract import Shape

SHAPE = Shape(cpus=2, memory_mib=512, disk_bytes=1 << 30)
SOCKETS = Descriptors(qmp=11, agent=12, console=13)


def launch(**more):
    given = {
        "machine_id": "abc",
        "shape": SHAPE,
        "accelerator": "tcg",
        "cpu_model": "max",
        "base": Path("/store/a,b/base.raw"),
        "overlays": (Path("/store/one.qcow2"), Path("/store/two.qcow2")),
        "top": Path("/run/abc/disk0.qcow2"),
        "kernel": Path("/k"),
        "initrd": Path("/i"),
    }
    return Launch(**{**given, **more})


def values(argv, option):
    return [argv[n + 1] for n, word in enumerate(argv) if word == option]


def devices(argv):
    return values(argv, "-device")


def nodes(argv):
    return [json.loads(value) for value in values(argv, "-blockdev")]


def memory(argv):
    return json.loads(values(argv, "-object")[0])


def test_confined_and_without_defaults():
    argv = command(launch(), SOCKETS)
    assert argv[0] == "qemu-system-x86_64"
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(argv)
    (sandbox,) = values(argv, "-sandbox")
    denied = ("obsolete=deny", "elevateprivileges=deny", "spawn=deny", "resourcecontrol=deny")
    assert sandbox.split(",") == ["on", *denied]
    assert values(argv, "-mon") == ["chardev=qmp,mode=control"]
    assert "socket,id=agent,fd=12" in values(argv, "-chardev")
    assert not any("listen" in word or "server" in word for word in argv)


def test_boot_and_restore_have_the_same_devices():
    boot = command(launch(), SOCKETS)
    restore = command(launch(restored=True, memory=Path("/m"), kernel=None, initrd=None), SOCKETS)
    for option in ("-device", "-M", "-cpu", "-smp", "-m", "-global", "-chardev", "-blockdev"):
        assert values(boot, option) == values(restore, option)
    assert memory(boot)["share"] is True
    assert memory(restore)["share"] is False
    assert memory(restore)["mem-path"] == "/m"
    assert memory(boot)["mem-path"] == "/run/abc/memory"
    assert values(restore, "-incoming") == ["defer"]
    assert not values(boot, "-incoming")
    assert not values(restore, "-append")


def test_only_the_top_of_the_disk_can_be_written():
    chain = nodes(command(launch(), SOCKETS))
    assert [node["node-name"] for node in chain] == ["base", "layer0", "layer1", "top0"]
    assert [node.get("backing") for node in chain] == [None, "base", "layer0", "layer1"]
    assert [node["read-only"] for node in chain] == [True, True, True, False]
    assert [node["file"]["read-only"] for node in chain] == [True, True, True, False]
    assert chain[0]["file"]["filename"] == "/store/a,b/base.raw"  # JSON: a comma is no separator


@pytest.mark.parametrize(("network", "count"), [("none", 0), ("full", 1)])
def test_a_network_device_only_where_asked_for(network, count):
    shape = Shape(cpus=1, memory_mib=128, disk_bytes=1 << 30, network=network)
    argv = command(launch(shape=shape), SOCKETS)
    assert sum("net" in device for device in devices(argv)) == count
    assert len(values(argv, "-netdev")) == count


def test_kernel_arguments():
    (line,) = values(command(launch(tsc_khz=2_600_000, hostname="box"), SOCKETS), "-append")
    words = line.split()
    assert "panic=-1" in words
    assert "tsc_early_khz=2600000" in words
    assert "smolbuild.hostname=box" in words
    (line,) = values(command(launch(), SOCKETS), "-append")
    assert "tsc_early_khz" not in line
    assert "init_on_free" not in line
    (line,) = values(command(launch(zero_freed=True), SOCKETS), "-append")
    assert "init_on_free=1" in line


def test_hardware_must_have_the_whole_model():
    assert cpu_option("tcg", "max") == "max"
    assert cpu_option("kvm", "Haswell-v2") == "Haswell-v2,enforce=on"


def test_swap_is_reserved_only_where_the_host_insists():
    assert "reserve" not in memory(command(launch(restored=True, memory=Path("/m")), SOCKETS))
    relaxed = launch(restored=True, memory=Path("/m"), reserve_swap=False)
    assert memory(command(relaxed, SOCKETS))["reserve"] is False
