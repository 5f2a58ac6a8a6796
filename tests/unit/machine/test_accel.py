import json
import os
import time

import pytest

from smolbuild.core.errors import HostError
from smolbuild.core.home import Home
from smolbuild.machine import accel, accel_probe

TICKS = round(2_600_000_000 * accel_probe._TIMER_TICKS / accel_probe._TIMER_HZ)

# Stands in for QEMU: notes how it was called, and behaves per accelerator as told.
QEMU = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  --version) echo "QEMU emulator version 9.1.2 (Debian)"; exit 0;;
  *"-accel tcg"*) {tcg};;
  *"-cpu Haswell"*) {best};;
  *) {other};;
esac
"""
OCTAL = "".join(rf"\{byte:03o}" for byte in TICKS.to_bytes(8, "little"))
RUNS = f"printf '{OCTAL}'; exit 33"
REFUSES = "echo 'Host does not support requested features' >&2; exit 1"
SPINS = "exec sleep 60"


@pytest.fixture
def qemu(tmp_path, monkeypatch):
    """Give a function that installs a QEMU, and the log of its calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(accel_probe, "_hardware", lambda: ("kvm", ""))
    monkeypatch.setattr(accel_probe, "_cpu_vendor", lambda: "GenuineIntel")
    monkeypatch.setattr(accel_probe, "_PROBE_SECONDS", 1.0)

    def install(*, tcg=RUNS, best=RUNS, other=RUNS):
        program = programs / "qemu-system-x86_64"
        program.write_text(QEMU.format(log=log, tcg=tcg, best=best, other=other))
        program.chmod(0o755)
        return log

    return install


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


def test_hardware_that_runs_a_guest_is_used(qemu, home):
    log = qemu()
    found = accel.choose_acceleration(home)
    assert (found.accelerator, found.tsc_khz) == ("kvm", 0)
    assert found.cpu_model == "Haswell-v2,vendor=GenuineIntel"
    assert found.engine_version == "9.1.2"
    calls = log.read_text()
    assert "enforce=on" in calls
    assert accel.choose_acceleration(home) == found
    assert log.read_text() == calls  # remembered


def test_an_older_processor_gets_an_older_model(qemu, home):
    qemu(best=REFUSES)
    assert accel.choose_acceleration(home).cpu_model == "Nehalem-v1,vendor=GenuineIntel"


@pytest.mark.parametrize("kvm", [SPINS, REFUSES, "exit 0", "exit 33", "exit 1"])
def test_hardware_that_runs_no_guest_means_software_in_time(qemu, home, kvm):
    qemu(best=kvm, other=kvm)
    began = time.monotonic()
    found = accel.choose_acceleration(home)
    assert time.monotonic() - began < 10
    assert (found.accelerator, found.tsc_khz) == ("tcg", 2_600_000)
    assert found.reason.startswith("KVM ")
    assert "software emulation" in found.reason
    assert "\n" not in found.reason


def test_a_new_boot_or_another_qemu_asks_again(qemu, home, monkeypatch):
    log = qemu()
    accel.choose_acceleration(home)
    first = log.read_text()
    monkeypatch.setattr(accel, "_boot_id", lambda: "another boot")
    accel.choose_acceleration(home)
    second = log.read_text()
    assert len(second) == 2 * len(first)
    qemu(tcg=RUNS, best=REFUSES, other=REFUSES)
    assert accel.choose_acceleration(home).accelerator == "tcg"


def test_a_damaged_memory_is_no_answer(qemu, home):
    qemu()
    found = accel.choose_acceleration(home)
    path = home.cache / "acceleration-auto.json"
    for damage in (b"", b"[]", b"{}", path.read_bytes()[:-9], b"\xff"):
        path.write_bytes(damage)
        assert accel.choose_acceleration(home) == found


def test_distrust_lasts_until_the_next_boot(qemu, home, monkeypatch):
    qemu()
    found = accel.choose_acceleration(home)
    accel.distrust_acceleration(home, found, "a kernel did not start")
    after = accel.choose_acceleration(home)
    assert (after.accelerator, after.reason) == ("tcg", "a kernel did not start")
    monkeypatch.setattr(accel, "_boot_id", lambda: "another boot")
    assert accel.choose_acceleration(home).accelerator == "kvm"


def test_what_was_asked_for_must_work(qemu, home):
    qemu(best=REFUSES, other=REFUSES)
    assert accel.choose_acceleration(home, wanted="tcg").accelerator == "tcg"
    with pytest.raises(HostError, match="kvm"):
        accel.choose_acceleration(home, wanted="kvm")


def test_a_host_that_runs_nothing_is_an_error(qemu, home):
    qemu(tcg="exit 1", best=REFUSES, other=REFUSES)
    with pytest.raises(HostError, match="runs no guest"):
        accel.choose_acceleration(home)
    assert not (home.cache / "acceleration-auto.json").exists()


def test_a_missing_qemu_names_its_package(home, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError) as caught:
        accel.choose_acceleration(home)
    assert "qemu-system-x86" in caught.value.hint


def test_what_is_kept_is_json_of_this_host(qemu, home):
    qemu()
    accel.choose_acceleration(home)
    kept = json.loads((home.cache / "acceleration-auto.json").read_bytes())
    assert kept["accelerator"] == "kvm"
