"""What only a real guest can show: sharing, isolation, crashes, egress, acceleration."""

import contextlib
import dataclasses
import errno
import http.server
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_contract import restore_spec, sh

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import HostError, MachineError
from smolbuild.machine.accel import choose_acceleration
from smolbuild.machine.base import Freshen
from smolbuild.machine.cursor import Cursor
from smolbuild.machine.qemu import QemuEngine
from smolbuild.machine.rundir import sweep
from smolbuild.model.smolfile import HttpProbe, PortProbe


def output_of(machine, script):
    seen = bytearray()
    result = machine.exec(sh(script), lambda _, data: seen.extend(data))
    return result.status, bytes(seen).decode()


def private_memory(pid):
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(n) for n in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) << 10


def processes_naming(text):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def test_four_forks_at_once_differ_and_share_memory(engine, spec, saved):
    def restore(number):
        machine = engine.restore(restore_spec(spec, saved), timeout=60)
        call = Freshen(hostname=f"fork-{number}", machine_id=f"{number:032x}")
        return machine, machine.freshen(call)

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(restore, range(1, 5)))
    machines = [machine for machine, _ in made]
    try:
        identities = [identity for _, identity in made]
        for field in ("machine_id", "boot_id", "random"):
            assert len({getattr(i, field) for i in identities}) == 4
        assert all(abs(i.clock - time.time()) < 30 for i in identities)
        assert [output_of(m, "hostname")[1] for m in machines] == [
            f"fork-{n}\n" for n in range(1, 5)
        ]
        # Guest memory in use is shared: what a fork has of its own is mostly the emulator's.
        assert all(0 < private_memory(m._process.child.pid) < 110 << 20 for m in machines)
    finally:
        for machine in machines:
            machine.discard()


def test_a_fork_writes_to_nothing_shared(spec, saved, fork):
    before = {p: p.stat().st_mtime_ns for p in (saved.memory, saved.state, saved.disk_overlay)}
    base = spec.disk.base.stat().st_mtime_ns
    assert output_of(fork, "dd if=/dev/zero of=/big bs=1M count=8 && sync")[0] == 0
    fork.discard()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert spec.disk.base.stat().st_mtime_ns == base


def test_discard_leaves_no_process_and_no_file(home, engine, spec, saved):
    machine = engine.restore(restore_spec(spec, saved))
    directory = home.run / machine.id
    pid = machine._process.child.pid
    assert directory.is_dir()
    assert directory.stat().st_mode & 0o777 == 0o700
    threads = threading.active_count()
    machine.discard()
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()
    assert threading.active_count() < threads


def test_an_engine_that_dies_is_an_error_with_its_console(fork):
    os.kill(fork._process.child.pid, signal.SIGKILL)
    with pytest.raises(MachineError, match="ended"):
        fork.exec(sh("true"))


def test_a_guest_that_panics_ends_its_engine(engine, spec):
    machine = engine.boot(spec)
    try:
        machine.exec(sh("echo 1 > /proc/sys/kernel/sysrq", exec_id="on"))
        with pytest.raises(MachineError) as caught:
            machine.exec(sh("echo c > /proc/sysrq-trigger; sleep 60"))
        assert "sysrq" in caught.value.details
        assert machine.console()
    finally:
        machine.discard()


def test_no_guest_boots_from_a_damaged_disk(engine, spec, tmp_path):
    bad = tmp_path / "bad.raw"
    with bad.open("wb") as file:
        file.truncate(spec.shape.disk_bytes)
    wrong = dataclasses.replace(spec, disk=dataclasses.replace(spec.disk, base=bad))
    with pytest.raises(MachineError, match="did not boot") as caught:
        engine.boot(wrong, timeout=60)
    assert "cannot boot" in caught.value.details


def test_a_restore_that_gets_stuck_is_killed_at_its_deadline(home, engine, spec, saved, tmp_path):
    before = set(home.run.iterdir())
    stuck = tmp_path / "state"
    os.mkfifo(stuck)
    writer = os.open(stuck, os.O_RDWR)  # nothing ever comes, and no end either
    try:
        began = time.monotonic()
        with pytest.raises(MachineError, match="in time"):
            engine.restore(restore_spec(spec, dataclasses.replace(saved, state=stuck)), timeout=2)
        assert 2 <= time.monotonic() - began < 8
    finally:
        os.close(writer)
    assert set(home.run.iterdir()) == before


def test_memory_that_does_not_belong_to_the_state_is_an_error(engine, spec, saved, tmp_path):
    empty = tmp_path / "memory"
    with empty.open("wb") as file:
        file.truncate(spec.shape.memory_mib << 20)
    with pytest.raises(MachineError, match="did not restore"):
        engine.restore(restore_spec(spec, dataclasses.replace(saved, memory=empty)), timeout=5)


def test_more_processors_and_a_network_survive_a_checkpoint(engine, spec, tmp_path):
    shape = dataclasses.replace(spec.shape, cpus=3, memory_mib=160, network="full")
    wide = dataclasses.replace(spec, shape=shape)
    machine = engine.boot(wide)
    count = "echo /sys/devices/system/cpu/cpu[0-9]* /sys/class/net/eth*"
    try:
        status, before = output_of(machine, count)
        assert status == 0
        assert before.split()[-2:] == ["/sys/devices/system/cpu/cpu2", "/sys/class/net/eth0"]
        saved = machine.checkpoint(tmp_path)
    finally:
        machine.discard()
    fork = engine.restore(restore_spec(wide, saved))
    try:
        fork.freshen(Freshen(hostname="wide", machine_id="a" * 32))
        assert output_of(fork, count) == (0, before)
        with pytest.raises(MachineError, match="shares its memory"):
            fork.checkpoint(tmp_path)
    finally:
        fork.discard()


def test_another_clock_does_not_fit(engine, spec, saved):
    cursor = Cursor.decode(saved.agent_cursor)
    if not cursor.tsc_khz:
        assert engine.contract().accelerator != "tcg"
        return
    faster = dataclasses.replace(cursor, tsc_khz=cursor.tsc_khz * 2)
    with pytest.raises(MachineError, match="MHz") as caught:
        engine.restore(restore_spec(spec, dataclasses.replace(saved, agent_cursor=faster.encode())))
    assert caught.value.code == "contract"


KILLED = """
import pickle, sys
from smolbuild.core.events import silent
from smolbuild.core.home import Home
from smolbuild.machine.qemu import QemuEngine
home, spec = pickle.load(open(sys.argv[1], "rb"))
machine = QemuEngine(home, emit=silent, environment={}).restore(spec)
print(machine.id, machine._process.child.pid, flush=True)
sys.stdin.read()
"""


def test_kill_9_of_the_parent_leaves_nothing(home, spec, saved, tmp_path):
    told = tmp_path / "spec"
    told.write_bytes(pickle.dumps((home, restore_spec(spec, saved))))
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        name, pid = parent.stdout.readline().split()
        assert int(pid) in processes_naming(name)
        engine_process = os.pidfd_open(int(pid))
        parent.kill()
    try:
        assert select.select([engine_process], [], [], 10)[0], "QEMU outlived its parent"
    finally:
        os.close(engine_process)
    assert (home.run / name).is_dir()
    assert sweep(home) >= 1
    assert not (home.run / name).exists()


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"hello from the host"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_guest_reaches_what_is_allowed_and_nothing_else(fork, web):
    get = "http_proxy=http://127.0.0.1:3128 wget -q -O - http://%s:%d/path?secret 2>&1"
    assert output_of(fork, get % ("127.0.0.1", web))[0] != 0  # nothing listens yet
    fork.allow(("nothing.example.com",), ("127.0.0.1/32",))
    assert output_of(fork, get % ("127.0.0.1", web)) == (0, "hello from the host")
    status, said = output_of(fork, get % ("other.example.com", 80))
    assert status != 0
    assert "403" in said
    assert [(r.url, r.status, r.received, r.denied) for r in fork.egress_records()] == [
        (f"http://127.0.0.1:{web}/path", 200, 19, False),
        ("http://other.example.com/path", 403, 0, True),
    ]
    fork.allow(None)
    assert output_of(fork, get % ("127.0.0.1", web))[0] != 0


def test_probes_reach_a_service_in_the_guest(fork):
    script = "while true; do printf 'HTTP/1.0 200 OK\\r\\n\\r\\nseeded 1000' | nc -l -p 8080; done"
    fork.exec(sh(script, exec_id="service:web", keep=True))
    assert fork.probe_until(PortProbe(port=8080), deadline=20).ok
    found = fork.probe_until(HttpProbe(port=8080, contains="seeded 1000"), deadline=20)
    assert found.ok
    assert not fork.probe(HttpProbe(port=8080, contains="no such text"), timeout=5).ok
    assert not fork.probe(PortProbe(port=9), timeout=5).ok


def test_the_acceleration_probe_ends_and_is_remembered(fresh_home):
    deadline = Deadline.after(40)
    found = choose_acceleration(fresh_home)
    assert not deadline.passed()
    assert found.accelerator in ("kvm", "tcg")
    assert found.reason
    began = time.monotonic()
    assert choose_acceleration(fresh_home) == found
    assert time.monotonic() - began < 0.2
    with contextlib.suppress(HostError):  # this host's KVM may not run guests: then it says so
        assert choose_acceleration(fresh_home, wanted="kvm").accelerator == "kvm"
    assert choose_acceleration(fresh_home, wanted="tcg").tsc_khz > 100_000


def test_software_emulation_is_said_by_a_boot_and_by_nothing_else(home, spec, saved):
    said = []
    engine = QemuEngine(home, emit=said.append, environment={})
    contract = engine.contract()
    engine.restore(restore_spec(spec, saved)).discard()
    assert said == []
    engine.boot(spec).discard()
    assert len(said) == (contract.accelerator == "tcg")


def test_steps_between_snapshots_still_own_the_files_that_name_the_machine(engine, spec, tmp_path):
    machine = engine.boot(spec)
    try:
        machine.snapshot(tmp_path)
        renamed = "echo renamed > /etc/hostname.new && mv /etc/hostname.new /etc/hostname"
        status, said = output_of(machine, f"hostname && {renamed} && cat /etc/hostname")
        assert (status, said) == (0, "smolbuild\nrenamed\n")
    finally:
        machine.discard()


def test_a_snapshot_without_space_leaves_the_machine_as_it_was(engine, spec, tmp_path, monkeypatch):
    machine = engine.boot(spec)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("smolbuild.machine.memory.os.pwrite", _no_space)
            with pytest.raises(HostError, match="no space left"):
                machine.snapshot(tmp_path)
        assert output_of(machine, "echo alive") == (0, "alive\n")
        assert machine.snapshot_disk().name == "disk0.qcow2"
    finally:
        machine.discard()


def _no_space(*_arguments):
    raise OSError(errno.ENOSPC, "full")
