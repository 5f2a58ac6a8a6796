"""The disk of a machine that still runs: written by a real kernel, its journal not yet emptied."""

import re
import shutil
import subprocess

import pytest
from engine_contract import sh

from smolbuild.machine.base import BootSpec, Disk, Shape
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.ext4_owners import PlaceKind
from smolbuild.source.ext4_reader import open_disk
from smolbuild.source.rootfs import read_rootfs
from smolbuild.source.tree import Kind

pytestmark = pytest.mark.vm

SIZE = 96 << 20
SCRIPT = """\
set -e
mkdir -p /work/deep /work/gone
name=/work/deep/a-name-that-is-long
i=0; while [ $i -lt 400 ]; do echo "content $i" > $name-$i; i=$((i+1)); done
sync
rm -r /work/gone
busybox rm /work/deep/a-name-that-is-long-7
echo hello > /work/hello
busybox ln /work/hello /work/linked
busybox ln -s hello /work/short
busybox ln -s $(printf 'x%.0s' $(busybox seq 100)) /work/long
busybox mknod /work/null c 1 3
busybox mkfifo /work/pipe
busybox chown 1234:99999 /work/hello
busybox chmod 4711 /work/hello
dd if=/dev/zero of=/work/sparse bs=4096 seek=2000 count=1 2>/dev/null
echo tail >> /work/sparse
busybox fallocate -l 65536 /work/reserved
echo THE-CONTENT-OF-NOTHING > /work/freed
sync
busybox rm /work/open /work/freed
busybox mv /work/deep/a-name-that-is-long-8 /work/deep/renamed
sync
"""


@pytest.fixture(scope="module")
def disk(engine, guest_files, base_disk, tmp_path_factory):
    """Give the flat disk as a real guest left it, file system still mounted."""
    directory = tmp_path_factory.mktemp("guest-disk")
    tree = read_rootfs(base_disk.parent / "root")
    base = directory / "base.raw"
    write_ext4(tree, base, SIZE)
    kernel, initrd = guest_files
    spec = BootSpec(
        kernel=kernel,
        initrd=initrd,
        disk=Disk(base=base),
        shape=Shape(cpus=1, memory_mib=128, disk_bytes=SIZE),
    )
    machine = engine.boot(spec)
    try:
        opened = "mkdir /work; echo THE-DELETED-CONTENT > /work/open; exec sleep 1000 < /work/open"
        machine.exec(sh(opened, exec_id="service:opened", keep=True))
        done = machine.exec(sh("until cat /work/open; do sleep 0.1; done; " + SCRIPT))
        assert done.status == 0, done
        saved = machine.checkpoint(directory)
    finally:
        machine.discard()
    flat = directory / "flat.raw"
    overlay = str(saved.disk_overlay)  # does not say what it lies on
    for command in (
        ["qemu-img", "rebase", "-u", "-F", "raw", "-b", str(base), overlay],
        ["qemu-img", "convert", "-O", "raw", overlay, str(flat)],
    ):
        subprocess.run(command, check=True, timeout=60)
    return flat


def test_what_the_guest_wrote_is_read(disk):
    with open_disk(disk) as opened:
        assert opened.journal_blocks > 0, "nothing stood in the journal: the test proves nothing"
        nodes = {node.path: node for node in opened.walk()}
        names = {path for path in nodes if path.startswith(b"/work/deep/")}
        numbers = [n for n in range(400) if n not in (7, 8)]
        wanted = {b"/work/deep/a-name-that-is-long-%d" % n for n in numbers}
        assert names == wanted | {b"/work/deep/renamed"}
        for n in numbers[::37]:
            node = nodes[b"/work/deep/a-name-that-is-long-%d" % n]
            assert b"".join(opened.content(node)) == b"content %d\n" % n
        hello = nodes[b"/work/hello"]
        assert (hello.mode, hello.uid, hello.gid, hello.links) == (0o4711, 1234, 99999, 2)
        assert hello.ino == nodes[b"/work/linked"].ino
        assert nodes[b"/work/short"].target == b"hello"
        assert nodes[b"/work/long"].target == b"x" * 100
        assert (nodes[b"/work/null"].kind, nodes[b"/work/null"].device) == (Kind.CHAR, (1, 3))
        assert nodes[b"/work/pipe"].kind is Kind.FIFO
        sparse = b"".join(opened.content(nodes[b"/work/sparse"]))
        assert sparse == bytes(2001 * 4096) + b"tail\n"
        assert b"".join(opened.content(nodes[b"/work/reserved"])) == bytes(65536)
        assert b"/work/open" not in nodes
        assert b"/work/gone" not in nodes


def test_it_is_what_e2fsck_makes_of_it(disk, tmp_path):
    """After the kernel's own replay rules (e2fsck's) the same names and contents are there."""
    copy = tmp_path / "copy.raw"
    shutil.copyfile(disk, copy)
    with open_disk(disk) as opened:
        before = [
            (n, b"".join(opened.content(n)) if n.kind is Kind.FILE else b"") for n in opened.walk()
        ]
    done = subprocess.run(
        ["e2fsck", "-E", "journal_only", "-y", str(copy)],
        capture_output=True, check=False, text=True, timeout=60,
    )  # fmt: skip
    assert "recovering journal" in done.stdout + done.stderr
    with open_disk(copy) as opened:
        assert opened.journal_blocks == 0
        after = [
            (n, b"".join(opened.content(n)) if n.kind is Kind.FILE else b"") for n in opened.walk()
        ]
    assert before == after


def test_the_places_of_what_has_no_name_any_more(disk):
    data = disk.read_bytes()
    with open_disk(disk) as opened:
        for text, wanted in (
            (b"THE-DELETED-CONTENT\n", PlaceKind.DELETED),  # a process still has it open
            (b"THE-CONTENT-OF-NOTHING\n", PlaceKind.FREE),
        ):
            at = [match.start() for match in re.finditer(re.escape(text), data)]
            kinds = {place.kind for place in opened.owners_of(at).values()}
            assert kinds == {wanted}, text
        at = data.index(b"content 11\n")
        assert opened.owners_of([at])[at].path == b"/work/deep/a-name-that-is-long-11"
