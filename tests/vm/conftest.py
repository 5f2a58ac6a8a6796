"""What the tests with real guests share: kernel, initramfs, base disk and one checkpoint."""

import shutil
import subprocess
from pathlib import Path

import pytest
from engine_contract import checkpoint_of, restore_spec

from smolbuild.core.events import silent
from smolbuild.core.home import Home
from smolbuild.guest.compile import build_agent
from smolbuild.guest.initramfs import build_initramfs
from smolbuild.machine.base import BootSpec, Disk, Freshen, Shape
from smolbuild.machine.qemu import QemuEngine
from smolbuild.source.kernel import prepare_kernel

DISK_BYTES = 128 << 20
APPLETS = (
    "sh", "cat", "echo", "sleep", "true", "hostname", "nc", "wget", "dd", "ls", "sync", "id",
    "nslookup", "printf", "readlink", "ln", "rm", "ssl_client",
)  # fmt: skip


@pytest.fixture(scope="session")
def guest_files(home: Home, tmp_path_factory) -> tuple[Path, Path]:
    """Give the kernel and the initramfs."""
    kernel = prepare_kernel(home.cache, locked=None, emit=silent)
    initrd = tmp_path_factory.mktemp("guest") / "initrd"
    build_initramfs(kernel, build_agent(home.cache), initrd)
    return kernel.vmlinuz, initrd


@pytest.fixture(scope="session")
def base_disk(tmp_path_factory) -> Path:
    """Give a disk with nothing but busybox."""
    directory = tmp_path_factory.mktemp("base")
    root = directory / "root"
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "run", "root", "var/log"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    escape = Path(__file__).with_name("escape.c")
    subprocess.run(
        ["musl-gcc", "-static", "-Os", "-o", root / "bin/escape", escape], check=True, timeout=60
    )
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    disk = directory / "base.raw"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-E", "root_owner=0:0", "-d", str(root), str(disk)],
        check=True,
        timeout=60,
    )
    return disk


@pytest.fixture(scope="session")
def spec(guest_files, base_disk) -> BootSpec:
    """Give the one guest that the tests boot."""
    kernel, initrd = guest_files
    return BootSpec(
        kernel=kernel,
        initrd=initrd,
        disk=Disk(base=base_disk),
        shape=Shape(cpus=1, memory_mib=128, disk_bytes=DISK_BYTES),
    )


@pytest.fixture(scope="session")
def engine(home: Home) -> QemuEngine:
    """Give the engine that all machines of the run share."""
    return QemuEngine(home, emit=silent, environment={})


@pytest.fixture(scope="session")
def saved(engine, spec, homes):
    """Give a checkpoint of a machine with a file and a living service."""
    directory = homes / "checkpoint"
    directory.mkdir()
    machine = engine.boot(spec)
    try:
        return checkpoint_of(machine, directory)
    finally:
        machine.discard()


@pytest.fixture
def fork(engine, spec, saved):
    """Give a fresh fork of the checkpoint."""
    machine = engine.restore(restore_spec(spec, saved))
    machine.freshen(Freshen(hostname="fork", machine_id="f" * 32))
    yield machine
    machine.discard()
