"""The agent as process 1 of real guests: what the same program outside one cannot show."""

import dataclasses
import io
import tarfile
import time

import pytest
from engine_contract import sh

from smolbuild.core.errors import MachineError
from smolbuild.machine.base import ExecRequest, Freshen, Terminal


def output_of(machine, script, **options):
    seen = bytearray()
    request = dataclasses.replace(sh(script), **options)
    result = machine.exec(request, lambda _, data: seen.extend(data))
    assert result.status == 0, bytes(seen).decode()
    return bytes(seen).decode()


def archive(*members):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target.getvalue()


def test_file_systems_are_where_programs_expect_them(fork):
    mounts = [line.split() for line in output_of(fork, "cat /proc/mounts").splitlines()]
    at = {fields[1]: fields[2] for fields in mounts}
    expected = {
        "/": "ext4",
        "/proc": "proc",
        "/sys": "sysfs",
        "/sys/fs/cgroup": "cgroup2",
        "/dev": "devtmpfs",
        "/dev/pts": "devpts",
        "/dev/shm": "tmpfs",
        "/run": "tmpfs",
    }
    assert expected.items() <= at.items()
    assert output_of(fork, "echo through > /dev/stdout") == "through\n"
    assert "127.0.0.1\tlocalhost" in output_of(fork, "cat /etc/hosts")


def test_nothing_of_an_execution_outlives_it_even_in_its_own_session(fork):
    fork.exec(sh("busybox setsid sleep 4321 & busybox setsid sleep 4321 & sleep 0.1"))
    assert "sleep 4321" not in output_of(fork, "busybox ps")
    late = dataclasses.replace(sh("busybox setsid sleep 4322 & sleep 4322"), timeout=1.0)
    assert fork.exec(late).timed_out
    assert "sleep 4322" not in output_of(fork, "busybox ps")


def test_control_groups_of_ended_executions_are_removed(fork):
    for _ in range(5):
        fork.exec(sh("true"))
    left = output_of(fork, "ls -d /sys/fs/cgroup/smolbuild/[0-9]*").split()
    assert len(left) <= 3  # this one, the checkpoint's service, and one just ending


def test_identity_files_follow_each_freshening(fork):
    files = "cat /etc/machine-id /proc/sys/kernel/random/boot_id /etc/hostname; hostname"
    seen = set()
    for name in ("first-name", "second", "a-third-and-longer-name"):
        machine_id = name.encode().hex()[:32].ljust(32, "0")
        identity = fork.freshen(Freshen(hostname=name, machine_id=machine_id))
        lines = output_of(fork, files).split()
        assert lines == [machine_id, identity.boot_id, name, name]
        again = fork.identity()
        assert (again.machine_id, again.boot_id) == (machine_id, identity.boot_id)
        assert abs(identity.clock - time.time()) < 5
        seen.add(identity.boot_id)
    assert len(seen) == 3


def test_a_program_that_cuts_an_identity_file_does_not_end_the_machine(fork):
    output_of(fork, ": > /etc/hostname; echo much longer than it was > /etc/machine-id")
    fork.freshen(Freshen(hostname="again", machine_id="a" * 32))
    assert output_of(fork, "cat /etc/hostname /etc/machine-id") == "again\n" + "a" * 32 + "\n"


def test_ssh_host_keys_are_made_anew(fork):
    keygen = "#!/bin/sh\n[ $1 = -A ] && echo new > /etc/ssh/ssh_host_ed25519_key\n"
    script = tarfile.TarInfo("usr/bin/ssh-keygen")
    script.mode = 0o755
    old = [tarfile.TarInfo(f"etc/ssh/ssh_host_{kind}_key") for kind in ("rsa", "ed25519")]
    data = archive((script, keygen.encode()), *((info, b"old") for info in old))
    fork.put([data], "/", timeout=20)
    call = Freshen(hostname="x", machine_id="b" * 32, regenerate=("ssh-host-keys",))
    assert fork.freshen(call).machine_id == "b" * 32
    assert output_of(fork, "cd /etc/ssh; echo *; cat *") == "ssh_host_ed25519_key\nnew\n"
    failing = tarfile.TarInfo("usr/bin/ssh-keygen")
    failing.mode = 0o755
    fork.put([archive((failing, b"#!/bin/sh\necho no entropy >&2; exit 1\n"))], "/", timeout=20)
    with pytest.raises(MachineError, match="no entropy"):
        fork.freshen(call)


def test_a_frozen_disk_blocks_writers_until_it_thaws(fork):
    channel = fork._channel
    channel.freeze()
    channel.freeze()  # idempotent
    fork.exec(dataclasses.replace(sh("echo x > /written"), exec_id="writer", keep=True))
    fork.exec(sh("sleep 0.3"))
    assert fork.service_status("writer") is None
    channel.thaw()
    channel.thaw()
    deadline = time.monotonic() + 20
    while (ended := fork.service_status("writer")) is None:
        assert time.monotonic() < deadline
    assert ended.status == 0


def test_users_with_their_supplementary_groups(fork):
    passwd = b"root:x:0:0::/root:/bin/sh\napp:x:7:8::/tmp:/bin/sh\n"
    group = b"root:x:0:\napp:x:8:\nextra:x:99:root,app\nother:x:98:root\n"
    members = [(tarfile.TarInfo("etc/passwd"), passwd), (tarfile.TarInfo("etc/group"), group)]
    for info, _ in members:
        info.mode = 0o644
    fork.put([archive(*members)], "/", timeout=20)
    assert output_of(fork, "id; echo $HOME", user="app") == (
        "uid=7(app) gid=8(app) groups=8(app),99(extra)\n/tmp\n"
    )
    assert output_of(fork, "id -u; id -g; id -G", user="app:extra") == "7\n99\n99\n"
    assert output_of(fork, "id -u; id -g", user="1234") == "1234\n0\n"


def test_device_nodes_and_owners_pass_both_ways(fork):
    node = tarfile.TarInfo("d/null")
    node.type, node.devmajor, node.devminor, node.mode = tarfile.CHRTYPE, 1, 3, 0o666
    node.uid, node.gid = 12, 34
    fork.put([archive((node, b""))], "/tmp", timeout=20)
    with tarfile.open(fileobj=io.BytesIO(b"".join(fork.get("/tmp/d", timeout=20)))) as tar:
        back = tar.getmember("d/null")
    assert back.ischr()
    assert (back.devmajor, back.devminor, back.uid, back.gid) == (1, 3, 12, 34)


def test_a_terminal_is_its_users_and_takes_keys(fork):
    script = (
        "busybox tty; busybox stty size; busybox stat -c %u $(busybox tty); echo $TERM;"
        "echo self > /dev/tty; busybox stty -echo; read x; echo got $x"
    )
    tty = Terminal(rows=12, columns=34, kind="vt100")
    seen = output_of(fork, script, tty=tty, user="1234", stdin=b"some ke\x7fey\r")
    lines = seen.replace("some ke\b \bey\r\n", "").splitlines()
    assert lines == ["/dev/pts/0", "12 34", "1234", "vt100", "self", "got some key"]


def test_a_session_rests_and_goes_on_in_the_same_machine(fork):
    fork._channel.quiesce()
    assert fork.exec(ExecRequest(argv=("true",), exec_id="after")).status == 0
    fork._channel.quiesce()
    assert fork.exec(ExecRequest(argv=("false",), exec_id="after")).status == 0


def test_the_network_of_a_full_machine_is_set_up(engine, spec):
    shape = dataclasses.replace(spec.shape, network="full")
    machine = engine.boot(dataclasses.replace(spec, shape=shape))
    try:
        script = "busybox ip addr show eth0; busybox ip route; cat /etc/resolv.conf"
        seen = output_of(machine, script)
        assert "10.0.2.15/24" in seen
        assert "default via 10.0.2.2" in seen
        assert "nameserver 10.0.2.3" in seen
        output = bytearray()
        offline = ExecRequest(
            argv=("/bin/sh", "-c", "busybox ip -o addr; busybox ip route; pwd"),
            workdir="/made/for/it",
            offline=True,
        )
        assert machine.exec(offline, lambda _, data: output.extend(data)).status == 0
        said = output.decode()
        assert "127.0.0.1/8" in said
        assert "10.0.2" not in said
        assert said.endswith("/made/for/it\n")
    finally:
        machine.discard()
