"""Finds which acceleration this host really offers, by running a guest.

An existing /dev/kvm proves nothing: on some hosts it opens, makes a virtual machine, enters 64-bit
code and gives right answers, but runs two million instructions a second, so that a kernel seems to
spin for ever. Only work done before a deadline is proof. The test guest is a ROM of 238 bytes that
turns on 64-bit paging, counts down from 16 million (10 ms where acceleration works, 17 s there),
measures the processor's time stamp counter against the timer chip and leaves through a debug port.

The frequency is measured because under software emulation the guest's counter is the host's, and
a kernel that measures it itself at boot fails to, and hangs, whenever the host is busy.
"""

import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Literal

from smolbuild.core.errors import HostError
from smolbuild.core.process import run
from smolbuild.machine.acceleration import PROGRAM, Acceleration, Accelerator
from smolbuild.machine.command import cpu_option

__all__ = ["emulation", "probe_host"]

_TCG_CPU = "max,la57=off"
"""All that software emulation has (images built for x86-64-v3 run), without the fifth level of
page tables, which only makes every miss longer. What ``max`` means depends on QEMU's version, and
that is part of the contract."""
_CPUS = {
    "GenuineIntel": ("Haswell-v2,vendor=GenuineIntel", "Nehalem-v1,vendor=GenuineIntel"),
    "AuthenticAMD": ("EPYC-v1,vendor=AuthenticAMD", "Opteron_G3-v1,vendor=AuthenticAMD"),
}
"""Named, versioned models, best first: a checkpoint restores on any host with the model's features,
not only on the one that saved it. The first that runs with ``enforce`` is taken."""

_PROBE_SECONDS = 4.0
_EMULATED_SECONDS = 30.0
_STUCK = f"starts a test guest, which does not get far in {_PROBE_SECONDS:.0f} s"
_TIMER_HZ, _TIMER_TICKS = 1_193_182, 65_535
_VERSION_SECONDS = 20.0
_PASSED = 33
"""isa-debug-exit ends QEMU with (value << 1) | 1; the ROM writes 0x10."""

_ROM_SIZE = 65536
_ROM_CODE = bytes.fromhex(
    "fa fc 31c0 8ec0 8ed0 b800f0 8ed8"  # cli; cld; es = ss = 0; ds = 0xf000
    "bf0010 6631c0 b9000c 66f3ab"  # clear three page tables at 0x1000
    "2666c706001003200000 2666c706002003300000 2666c706003083000000"  # identity map of 2 MiB
    "66b800100000 0f22d8 66b820000000 0f22e0"  # cr3 = 0x1000; cr4 = PAE
    "66b9800000c0 0f32 0d0001 0f30"  # EFER.LME
    "660f0116e800 0f20c0 660d01000080 0f22c0"  # lgdt; cr0 |= PG | PE
    "66ea70000f000800"  # far jump into 64-bit code
    "b900000001 ffc9 75fc"  # count down from 2^24
    "bd10000000 48c7c3ffffffff"  # 16 rounds, a busy host spoils some; rbx = fewest ticks
    "0f31 48c1e220 488d3410"  # rsi = time stamp
    "b030 e643 b0ff e640 e640"  # timer 0, mode 0: 65535 ticks of 1193182 Hz
    "b0e2 e643 e440 84c0 79f6"  # until its output is high
    "0f31 48c1e220 4809d0 4829f0 4839d8 480f42d8 ffcd 75cb"  # rbx = min(rbx, elapsed)
    "b908000000 88d8 e6e9 48c1eb08 e2f6"  # write rbx to port 0xe9
    "b010 66baf400 ee f4 ebfd"  # out 0xf4, 0x10; hlt for ever
    "0f1f440000"
    "0000000000000000 00000000009a2000"  # descriptors: null, 64-bit code
    "0f00 d8000f00"  # limit and base of the table
)
_RESET = bytes.fromhex("ea000000f0")
"""The processor's first instruction, 16 bytes below 4 GiB: jump to the start of the ROM."""


def probe_host(program: str, boot_id: str, wanted: Accelerator | None) -> Acceleration:
    """Return what guests can run with, found by running one (50 ms to a few seconds).

    Args:
        program: identity of the QEMU program, kept in the answer.
        boot_id: of the host's boot, kept in the answer.
        wanted: this accelerator and no other.

    Raises:
        HostError: QEMU is missing or broken, or the host does not offer what is wanted.

    """
    version = _engine_version()
    if wanted == "tcg":
        return emulation(program, boot_id, version, "software emulation was asked for")
    hardware, problem = _hardware()
    for model in _CPUS.get(_cpu_vendor(), ()) if hardware else ():
        outcome = _run_rom(hardware or "", model)
        if isinstance(outcome, int):
            return Acceleration(
                accelerator=hardware or "tcg",
                cpu_model=model,
                engine_version=version,
                tsc_khz=0,
                reason=f"a test guest ran under {(hardware or '').upper()}",
                boot_id=boot_id,
                program=program,
            )
        problem = f"{(hardware or '').upper()} {outcome}"
        if outcome == _STUCK:
            break
    if wanted is not None:
        raise HostError(
            f"this host cannot run guests with {wanted}: {problem}", code="acceleration"
        )
    return emulation(program, boot_id, version, f"{problem}: guests run under software emulation")


def emulation(program: str, boot_id: str, version: str, reason: str) -> Acceleration:
    """Return software emulation, seen to run, as the choice for ``reason``.

    Raises:
        HostError: it does not run.

    """
    khz = _run_rom("tcg", _TCG_CPU)
    if not isinstance(khz, int):
        raise HostError(
            f"QEMU {version} runs no guest on this host: software emulation {khz}",
            hint="see whether `qemu-system-x86_64 -M microvm` works at all, or reinstall QEMU",
            code="acceleration",
        )
    return Acceleration(
        accelerator="tcg",
        cpu_model=_TCG_CPU,
        engine_version=version,
        tsc_khz=khz,
        reason=reason,
        boot_id=boot_id,
        program=program,
    )


def _hardware() -> tuple[Literal["kvm", "hvf"] | None, str]:
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return None, f"guests are x86-64 and this host is {platform.machine()}"
    if sys.platform == "darwin":
        return "hvf", "HVF does not run this processor's guests"
    if not Path("/dev/kvm").exists():
        return None, "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return None, "/dev/kvm is not accessible (join the group kvm)"
    return "kvm", "KVM knows no portable model for this processor"


def _run_rom(accelerator: str, cpu_model: str) -> int | str:
    """Run the test guest; return the counter's kHz, or what went wrong as the end of a sentence."""
    with tempfile.NamedTemporaryFile(prefix="smolbuild-rom-") as rom:
        rom.write(_ROM_CODE.ljust(_ROM_SIZE - 16, b"\xf4") + _RESET.ljust(16, b"\xf4"))
        rom.flush()
        try:
            done = run(
                (
                    PROGRAM, "-nodefaults", "-no-user-config", "-display", "none",
                    "-M", "microvm,x-option-roms=off", "-accel", accelerator,
                    "-cpu", cpu_option(accelerator, cpu_model), "-m", "16", "-bios", rom.name,
                    "-chardev", "stdio,id=out", "-device", "isa-debugcon,iobase=0xe9,chardev=out",
                    "-device", "isa-debug-exit,iobase=0xf4,iosize=4",
                ),
                timeout=_PROBE_SECONDS if accelerator != "tcg" else _EMULATED_SECONDS,
            )  # fmt: skip
        except HostError as error:
            if error.code != "program-timeout":
                raise
            return _STUCK
    if done.status == _PASSED and len(done.stdout) == 8:
        return round(int.from_bytes(done.stdout, "little") * _TIMER_HZ / _TIMER_TICKS / 1000)
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"does not run a test guest ({lines[-1][:200] if lines else f'status {done.status}'})"


def _engine_version() -> str:
    done = run((PROGRAM, "--version"), timeout=_VERSION_SECONDS)
    match = re.search(rb"version (\d+\.\d+\.\d+)", done.stdout)
    if done.status != 0 or match is None:
        raise HostError(
            f"{PROGRAM} --version failed with status {done.status}",
            hint="reinstall it: apt-get install --reinstall qemu-system-x86",
            details=done.stderr.decode("utf-8", "replace")[-2000:],
        )
    return match[1].decode()


def _cpu_vendor() -> str:
    if sys.platform == "darwin":
        return "GenuineIntel"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""
