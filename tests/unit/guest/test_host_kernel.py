"""Kernels through apt, with an apt that serves packages made here; and kernels given as files."""

import os
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from smolbuild.core.digest import digest_file, hex_of
from smolbuild.core.errors import HostError, UsageError
from smolbuild.core.events import Event, silent
from smolbuild.guest.kernel import GUEST_MODULES, kernel_digest
from smolbuild.model.lock import LockedKernel
from smolbuild.source import kernel as kernels
from smolbuild.source import kernel_package as packages

RELEASE = "9.9.9-1-cloud-amd64"
IMAGE = f"linux-image-{RELEASE}"

APT_CACHE = """#!/bin/sh
echo "apt-cache $*" >> {log}
for name; do :; done
cat {lists}/"$name" 2>/dev/null || {{ echo "E: No packages found" >&2; exit 100; }}
"""
APT_GET = """#!/bin/sh
echo "apt-get $*" >> {log}
for name; do :; done
cp {pool}/"${{name%%=*}}".deb . 2>/dev/null || {{ echo "E: no such package" >&2; exit 100; }}
"""


def module(*depends: str) -> bytes:
    info = b"depends=" + ",".join(depends).encode() + b"\0"
    names = b"\0.modinfo\0"
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64 + len(info + names), 0, 64, 0, 0, 64, 3, 2
    )
    rows = ((1, 64, len(info)), (0, 64 + len(info), len(names)))
    return (
        header
        + info
        + names
        + b"\0" * 64
        + b"".join(
            struct.pack("<IIQQQQIIQQ", n, 1, 0, 0, at, size, 0, 0, 1, 0) for n, at, size in rows
        )
    )


class Apt:
    """A directory of programs that stand for apt, and what they serve."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        for name in ("bin", "lists", "pool"):
            (directory / name).mkdir(parents=True)
        for name, script in (("apt-cache", APT_CACHE), ("apt-get", APT_GET)):
            path = directory / "bin" / name
            path.write_text(
                script.format(log=self.log, lists=directory / "lists", pool=directory / "pool")
            )
            path.chmod(0o755)

    def package(self, name: str, files: dict[str, bytes], **fields: str) -> str:
        """Add a package and return the SHA-256 of its file."""
        tree = self.directory / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        for path, data in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
        control = {
            "Package": name,
            "Version": "9.9-1",
            "Architecture": "amd64",
            "Maintainer": "x <x@example.com>",
            "Description": "x",
            **fields,
        }
        text = "".join(f"{key}: {value}\n" for key, value in control.items())
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN" / "control").write_text(text)
        deb = self.directory / "pool" / f"{name}.deb"
        subprocess.run(
            ["dpkg-deb", "-Zgzip", "--build", "--root-owner-group", tree, deb],
            check=True,
            capture_output=True,
            timeout=60,
        )
        digest = hex_of(digest_file(deb))
        (self.directory / "lists" / name).write_text(f"{text}SHA256: {digest}\n\n{text}")
        return digest

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def modules(prefix: str) -> dict[str, bytes]:
    files = {
        f"{prefix}/kernel/drivers/{name.replace('virtio_rng', 'virtio-rng')}.ko": module("virtio")
        for name in GUEST_MODULES
        if name != "virtio_blk"
    }
    files[f"{prefix}/kernel/virtio.ko"] = module("virtio_ring")
    files[f"{prefix}/kernel/virtio_ring.ko"] = module()
    files[f"{prefix}/kernel/unrelated.ko"] = module()
    files[f"{prefix}/modules.builtin"] = b"kernel/drivers/block/virtio_blk.ko\n"
    return files


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    made = Apt(tmp_path / "apt")
    monkeypatch.setenv("PATH", f"{made.directory / 'bin'}:{os.environ['PATH']}")
    return made


def debian(apt: Apt) -> LockedKernel:
    apt.package("linux-image-cloud-amd64", {}, Depends=f"{IMAGE} (= 9.9-1)")
    digest = apt.package(
        IMAGE,
        {f"boot/vmlinuz-{RELEASE}": b"image", **modules(f"lib/modules/{RELEASE}")},
        Depends="kmod, linux-base",
    )
    return LockedKernel(package=IMAGE, version="9.9-1", sha256=digest)


def test_resolves_what_the_meta_package_depends_on(apt: Apt) -> None:
    expected = debian(apt)
    assert packages.resolve_kernel() == expected


def test_prepared_once_then_offline(apt: Apt, tmp_path: Path) -> None:
    locked = debian(apt)
    events: list[Event] = []
    made = kernels.prepare_kernel(tmp_path / "cache", locked=locked, emit=events.append)
    assert made.vmlinuz.read_bytes() == b"image"
    assert [path.name for path in made.modules] == [
        "virtio_ring.ko",
        "virtio.ko",
        "virtio_mmio.ko",
        "virtio_console.ko",
        "virtio_net.ko",
        "virtio_rng.ko",
    ]
    assert len(events) == 1
    assert [call.split()[0] for call in apt.calls()] == ["apt-get"]
    shutil.rmtree(apt.directory / "pool")
    again = kernels.prepare_kernel(tmp_path / "cache", locked=locked, emit=events.append)
    assert again == made
    assert len(apt.calls()) == 1
    assert len(events) == 1
    assert sorted(p.name for p in (tmp_path / "cache" / "kernel").iterdir()) == [
        ".lock",
        hex_of(made.digest),
    ]


def test_what_a_kernel_is_needs_no_download(apt: Apt, tmp_path: Path) -> None:
    locked = debian(apt)
    identity = kernels.kernel_identity(None, locked)
    assert apt.calls() == []
    made = kernels.prepare_kernel(tmp_path, locked=locked, emit=silent)
    assert made.digest == identity
    assert made.content == kernel_digest(made.vmlinuz, made.modules)
    changed = replace(locked, sha256="0" * 64)
    apart = replace(locked, modules_sha256="0" * 64)
    others = {kernels.kernel_identity(None, kernel) for kernel in (changed, apart)}
    assert len({identity, *others}) == 3
    with pytest.raises(UsageError):
        kernels.kernel_identity(None, None)


def test_without_a_lock_apt_chooses(apt: Apt, tmp_path: Path) -> None:
    expected = debian(apt)
    made = kernels.prepare_kernel(tmp_path, locked=None, emit=silent)
    assert (made.package, made.version) == (expected.package, expected.version)


def test_ubuntus_modules_come_in_their_own_package(apt: Apt, tmp_path: Path) -> None:
    release = "9.9.9-1-generic"
    apt.package("linux-image-virtual", {}, Depends=f"linux-image-{release}")
    digest = apt.package(
        f"linux-image-{release}",
        {f"boot/vmlinuz-{release}": b"image"},
        Depends=f"kmod, linux-modules-{release}",
    )
    apart = apt.package(f"linux-modules-{release}", modules(f"lib/modules/{release}"))
    locked = packages.resolve_kernel()
    assert (locked.sha256, locked.modules_sha256) == (digest, apart)
    made = kernels.prepare_kernel(tmp_path / "good", locked=locked, emit=silent)
    assert made.modules[0].name == "virtio_ring.ko"
    other = replace(locked, modules_sha256="0" * 64)
    with pytest.raises(HostError, match=r"linux-modules.* has another SHA-256"):
        kernels.prepare_kernel(tmp_path / "bad", locked=other, emit=silent)


def test_another_digest_than_the_locks_is_refused(apt: Apt, tmp_path: Path) -> None:
    debian(apt)
    locked = LockedKernel(package=IMAGE, version="9.9-1", sha256="0" * 64)
    with pytest.raises(HostError, match="SHA-256") as caught:
        kernels.prepare_kernel(tmp_path, locked=locked, emit=silent)
    assert "lock --update" in caught.value.hint
    assert [p.name for p in (tmp_path / "kernel").iterdir()] == [".lock"]


def test_no_lists_and_no_package_say_what_to_run(apt: Apt, tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        packages.resolve_kernel()
    assert "apt-get update" in caught.value.hint
    gone = LockedKernel(package=IMAGE, version="1", sha256="1" * 64)
    with pytest.raises(HostError, match="cannot download") as caught:
        kernels.prepare_kernel(tmp_path, locked=gone, emit=silent)
    assert "apt-get update" in caught.value.hint


def test_a_full_disk_is_said_before_anything_is_fetched(
    apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = debian(apt)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(HostError, match="needs 268,435,456 bytes") as caught:
        kernels.prepare_kernel(tmp_path, locked=locked, emit=silent)
    assert caught.value.code == "no-space"
    assert list((tmp_path / "kernel").glob("*")) == [tmp_path / "kernel" / ".lock"]


def test_what_a_killed_fetch_left_is_swept(apt: Apt, tmp_path: Path) -> None:
    left = tmp_path / "kernel" / ".tmp-kernel-abc"
    left.mkdir(parents=True)
    (left / "image.deb").write_bytes(b"half")
    kernels.prepare_kernel(tmp_path, locked=debian(apt), emit=silent)
    assert list((tmp_path / "kernel").glob(".tmp-*")) == []


def test_a_kernel_given_as_a_file(tmp_path: Path) -> None:
    image = tmp_path / "bzImage"
    image.write_bytes(b"\0" * 0x202 + b"HdrS" + b"\0" * 64)
    assert kernels.kernel_from_path(image).modules == ()
    for name in (*GUEST_MODULES, "virtio", "virtio_ring"):
        path = tmp_path / "modules" / f"{name}.ko"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(module(*(["virtio_ring"] if name == "virtio_blk" else [])))
    made = kernels.kernel_from_path(image)
    assert [path.stem for path in made.modules] == [
        "virtio_mmio",
        "virtio_ring",
        "virtio_blk",
        "virtio_console",
        "virtio_net",
        "virtio_rng",
    ]
    image.write_bytes(image.read_bytes() + b"changed")
    assert kernels.kernel_from_path(image).digest != made.digest


def test_a_file_that_is_no_kernel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel"
    with pytest.raises(HostError, match="cannot read"):
        kernels.kernel_from_path(path)
    path.write_bytes(b"\x7fELF" + b"\0" * 1000)
    with pytest.raises(HostError, match="bzImage"):
        kernels.kernel_from_path(path)


def test_other_architectures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="aarch64"))
    with pytest.raises(HostError, match="aarch64") as caught:
        packages.resolve_kernel()
    assert caught.value.code == "architecture"
