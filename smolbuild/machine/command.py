"""The QEMU command line of a machine, as a pure function of what is wanted.

The device list is the same at boot and at restore; only the memory's mapping, ``-incoming`` and the
kernel (which a restored machine has in its memory) differ.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolbuild.machine.acceleration import MACHINE_TYPE, PROGRAM
from smolbuild.model.contract import Shape

__all__ = [
    "AGENT_PORT",
    "KERNEL_ARGUMENTS",
    "Descriptors",
    "Launch",
    "command",
    "cpu_option",
    "overlay_node",
]

_FIRMWARE = "qboot.rom"
"""Ships with QEMU. Named, because what microvm takes by itself differs: Debian links its default to
qboot, Ubuntu's is SeaBIOS, which finds nothing to boot where there are no option ROMs."""

AGENT_PORT = "smolbuild.agent"
"""Name of the virtio-serial port that the agent opens."""

KERNEL_ARGUMENTS = (
    "console=ttyS0",
    "loglevel=6",  # the kernel's first line and its warnings: errors quote them
    "panic=-1",  # a dead guest reboots at once, and -no-reboot makes that the end of QEMU
    "reboot=t",
    "random.trust_cpu=on",
)

_MAC = "52:54:00:5b:1d:01"
"""Fixed: each machine has a network of its own, and a restored one must find the same device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Numbers of the inherited, connected sockets."""

    qmp: int
    agent: int
    console: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that decides the command line of one machine."""

    machine_id: str
    shape: Shape
    accelerator: str
    cpu_model: str
    base: Path
    overlays: tuple[Path, ...]
    """Finished overlays over the base, lowest first, read-only."""
    top: Path
    """The machine's own overlay."""
    memory: Path | None = None
    """The checkpoint's memory, mapped copy-on-write; None: the file ``memory`` beside ``top``."""
    restored: bool = False
    """Wait for the device state instead of booting."""
    kernel: Path | None = None
    initrd: Path | None = None
    tsc_khz: int = 0
    """What the guest's kernel is told of its time stamp counter; 0: it finds out by itself."""
    hostname: str = ""
    zero_freed: bool = False
    """Freed guest memory is zeroed: no residue in a checkpoint, and it compresses to nothing."""
    reserve_swap: bool = True
    """False: count the private memory of a fork when it is touched, not all of it at the start."""


def command(launch: Launch, descriptors: Descriptors) -> tuple[str, ...]:
    """Return the argument list that starts ``launch`` with the given inherited sockets."""
    return (
        PROGRAM,
        "-name", f"smolbuild-{launch.machine_id}",
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-M", f"{MACHINE_TYPE},x-option-roms=off,rtc=on,acpi=on,memory-backend=ram",
        "-bios", _FIRMWARE,
        "-global", "virtio-mmio.force-legacy=false",
        "-accel", launch.accelerator,
        "-cpu", cpu_option(launch.accelerator, launch.cpu_model),
        "-smp", str(launch.shape.cpus),
        "-m", f"{launch.shape.memory_mib}M",
        "-object", _json(_memory(launch)),
        *_channels(descriptors),
        *_disk(launch),
        "-object", "rng-builtin,id=rng", "-device", "virtio-rng-device,rng=rng",
        *_network(launch.shape),
        *_start(launch),
    )  # fmt: skip


def cpu_option(accelerator: str, cpu_model: str) -> str:
    """Return the value of ``-cpu``: hardware must have all of the model, or a restore may fail."""
    return cpu_model if accelerator == "tcg" else f"{cpu_model},enforce=on"


def overlay_node(name: str, path: Path, *, read_only: bool, backing: str | None) -> dict[str, Any]:
    """Return the block node ``name`` of an overlay file, for ``-blockdev`` and ``blockdev-add``."""
    return {
        "driver": "qcow2",
        "node-name": name,
        "read-only": read_only,
        "discard": "ignore" if read_only else "unmap",
        "backing": backing,
        # A machine's disk lives no longer than its machine: what must last is fsynced by us.
        "cache": {"direct": False, "no-flush": not read_only},
        "file": {"driver": "file", "filename": str(path), "read-only": read_only},
    }


def _memory(launch: Launch) -> Mapping[str, Any]:
    backend: dict[str, Any] = {
        "qom-type": "memory-backend-file",
        "id": "ram",
        "size": launch.shape.memory_mib << 20,
        "mem-path": str(launch.memory or launch.top.with_name("memory")),
        "share": launch.memory is None,
    }
    if launch.memory is not None and not launch.reserve_swap:
        backend["reserve"] = False
    return backend


def _channels(descriptors: Descriptors) -> Iterator[str]:
    yield from ("-chardev", f"socket,id=qmp,fd={descriptors.qmp}")
    yield from ("-mon", "chardev=qmp,mode=control")
    yield from ("-chardev", f"socket,id=console,fd={descriptors.console}")
    yield from ("-serial", "chardev:console")
    yield from ("-chardev", f"socket,id=agent,fd={descriptors.agent}")
    yield from ("-device", "virtio-serial-device,max_ports=2")
    yield from ("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}")


def _disk(launch: Launch) -> Iterator[str]:
    base = {
        "driver": "raw",
        "node-name": "base",
        "read-only": True,
        "file": {"driver": "file", "filename": str(launch.base), "read-only": True},
    }
    yield from ("-blockdev", _json(base))
    below = "base"
    for number, path in enumerate(launch.overlays):
        name = f"layer{number}"
        yield from (
            "-blockdev",
            _json(overlay_node(name, path, read_only=True, backing=below)),
        )
        below = name
    yield from (
        "-blockdev",
        _json(overlay_node("top0", launch.top, read_only=False, backing=below)),
    )
    yield from ("-device", "virtio-blk-device,drive=top0,id=disk,werror=report,rerror=report")


def _network(shape: Shape) -> Iterator[str]:
    if shape.network == "full":
        yield from ("-netdev", "user,id=net,ipv6=off")
        yield from ("-device", f"virtio-net-device,netdev=net,mac={_MAC}")


def _start(launch: Launch) -> Iterator[str]:
    if launch.restored:
        yield from ("-incoming", "defer")
        return
    yield from ("-kernel", str(launch.kernel), "-initrd", str(launch.initrd))
    arguments = list(KERNEL_ARGUMENTS)
    if launch.zero_freed:
        arguments.append("init_on_free=1")
    if launch.tsc_khz:
        # Without it the kernel measures the counter against the timer chip, fails when the host is
        # busy, then waits for a timer interrupt that a hardware-reduced machine never gets.
        arguments.append(f"tsc_early_khz={launch.tsc_khz}")
    if launch.hostname:
        arguments.append(f"smolbuild.hostname={launch.hostname}")
    yield from ("-append", " ".join(arguments))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
