"""What a copy-on-write restore costs above the floor, the start of a QEMU that does nothing.

    .venv/bin/python bench/restore.py [-n TIMES] [--memory MIB] [--accelerator tcg|kvm]

Boots a guest with an empty disk, saves it, then takes turns: one bare QEMU to its greeting, one
restore to the agent's answer. At the end four forks at once, and the memory each has of its own.
"""

import argparse
import re
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measure import summary

from smolbuild.core.clock import Deadline
from smolbuild.core.events import silent
from smolbuild.core.home import Home
from smolbuild.core.process import kill_group, spawn
from smolbuild.guest.compile import build_agent
from smolbuild.guest.initramfs import build_initramfs
from smolbuild.machine.base import BootSpec, Disk, RestoreSpec, Shape
from smolbuild.machine.qemu import QemuEngine
from smolbuild.machine.qmp import Qmp
from smolbuild.source.kernel import prepare_kernel

DISK_BYTES = 64 << 20


def floor(memory: int) -> float:
    """Start a QEMU without devices and return the milliseconds to its greeting."""
    began = time.monotonic()
    ours, theirs = socket.socketpair()
    with theirs:
        child = spawn(
            ("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-S",
             "-M", "microvm,x-option-roms=off", "-m", f"{memory}M",
             "-chardev", f"socket,id=q,fd={theirs.fileno()}", "-mon", "chardev=q,mode=control"),
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    qmp = Qmp(ours)
    qmp.greet(deadline=Deadline.after(30))
    elapsed = (time.monotonic() - began) * 1000
    kill_group(child)
    qmp.close()
    return elapsed


def make_checkpoint(engine: QemuEngine, home: Home, memory: int) -> tuple[RestoreSpec, float]:
    """Boot and save a guest; return how to restore it, and the milliseconds that saving took."""
    kernel = prepare_kernel(home.cache, locked=None, emit=silent)
    initrd, disk, root = home.root / "initrd", home.root / "disk", home.root / "root"
    build_initramfs(kernel, build_agent(home.cache), initrd)
    for name in ("proc", "sys", "dev", "run", "tmp", "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(disk)], check=True, timeout=60
    )
    shape = Shape(cpus=1, memory_mib=memory, disk_bytes=DISK_BYTES)
    began = time.monotonic()
    machine = engine.boot(
        BootSpec(kernel=kernel.vmlinuz, initrd=initrd, disk=Disk(base=disk), shape=shape)
    )
    print(f"boot to the agent's answer   {(time.monotonic() - began) * 1000:8.1f} ms")
    directory = home.root / "checkpoint"
    directory.mkdir()
    began = time.monotonic()
    saved = machine.checkpoint(directory)
    took = (time.monotonic() - began) * 1000
    machine.discard()
    spec = RestoreSpec(
        kernel=kernel.vmlinuz,
        initrd=initrd,
        disk=Disk(base=disk, overlays=(saved.disk_overlay,)),
        shape=shape,
        memory=saved.memory,
        state=saved.state,
        contract=saved.contract,
        agent_cursor=saved.agent_cursor,
    )
    return spec, took


def private_mib(pid: int) -> float:
    """Return the memory that a process shares with nobody."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(n) for n in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) / 1024


def four_at_once(engine: QemuEngine, spec: RestoreSpec) -> None:
    with ThreadPoolExecutor(4) as pool:
        forks = list(pool.map(engine.restore, [spec] * 4))
    times = [fork.milestones["agent"] for fork in forks]
    private = [private_mib(fork._process.child.pid) for fork in forks]  # noqa: SLF001
    for fork in forks:
        fork.discard()
    print(summary("four at once: agent", times))
    print(
        "four idle forks: private memory  " + "  ".join(f"{mib:.1f}" for mib in private) + "  MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Restore against the floor.")
    parser.add_argument("-n", "--times", type=int, default=20)
    parser.add_argument("--memory", type=int, default=256, help="MiB")
    parser.add_argument("--accelerator", choices=["tcg", "kvm"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="smolbuild-bench-") as directory:
        home = Home(Path(directory))
        engine = QemuEngine(home, emit=silent, accelerator=options.accelerator, environment={})
        print(f"under {engine.acceleration().accelerator}: {engine.acceleration().reason}")
        spec, took = make_checkpoint(engine, home, options.memory)
        print(f"checkpoint                   {took:8.1f} ms")
        floors, milestones = [], []
        for _ in range(options.times + 1):  # the first round warms the page cache
            floors.append(floor(options.memory))
            fork = engine.restore(spec)
            milestones.append(fork.milestones)
            fork.discard()
        print(summary("floor: QEMU to its greeting", floors[1:]))
        for name in milestones[0]:
            print(summary(f"restore: {name}", [at[name] for at in milestones[1:]]))
        four_at_once(engine, spec)


if __name__ == "__main__":
    main()
