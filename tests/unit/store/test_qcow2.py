import json
import struct
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import MachineError
from smolbuild.store.qcow2 import CLUSTER, clusters, create_overlay, virtual_size, write_overlay


def qemu(*argv):
    return subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout


@pytest.mark.parametrize("size", [512, CLUSTER, (1 << 30) + 512, 20 << 30, 5 << 40])
def test_qemu_finds_nothing_wrong_with_an_empty_overlay(tmp_path, size):
    path = tmp_path / "o.qcow2"
    create_overlay(path, size)
    qemu("qemu-img", "check", str(path))
    info = json.loads(qemu("qemu-img", "info", "--output=json", str(path)))
    assert info["virtual-size"] == size
    assert "backing-filename" not in info
    assert info["cluster-size"] == CLUSTER
    assert virtual_size(path) == size
    assert list(clusters(path)) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_overlay_is_never_overwritten(tmp_path):
    create_overlay(tmp_path / "o", 4096)
    with pytest.raises(FileExistsError):
        create_overlay(tmp_path / "o", 4096)
    for size in (0, -512, 513, 1 << 45):
        with pytest.raises(ValueError, match=f"{size} bytes"):
            create_overlay(tmp_path / "p", size)


WRITES = st.lists(
    st.tuples(
        st.sampled_from(["write", "write -z", "discard"]),
        st.integers(0, 6000),  # in units of 128 KiB, over two second-level tables
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=12, deadline=None)
@given(WRITES)
def test_map_agrees_with_qemu(tmp_path_factory, writes):
    path = tmp_path_factory.mktemp("map") / "o.qcow2"
    create_overlay(path, 1 << 30)
    commands = []
    for what, place, length in writes:
        commands += ["-c", f"{what} {place * 128}k {length * 32}k"]
    qemu("qemu-io", "-f", "qcow2", *commands, str(path))
    ours = list(clusters(path))
    assert all(a.guest_offset + a.length <= b.guest_offset for a, b in pairwise(ours))
    # As QEMU sees it: what the file decides, cluster by cluster, with its place in the file.
    theirs = {}
    for part in json.loads(qemu("qemu-img", "map", "--output=json", str(path))):
        if part["present"]:
            for at in range(part["start"], part["start"] + part["length"], 4096):
                # A zero cluster may keep its place in the file: what lies there is not its content.
                place = part["offset"] + at - part["start"] if part["data"] else None
                theirs[at] = place
    mine = {
        extent.guest_offset + at: extent.host_offset + at if extent.kind == "data" else None
        for extent in ours
        for at in range(0, extent.length, 4096)
    }
    assert mine == theirs


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "w.qcow2"
    create_overlay(path, 1 << 30)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 7 0 200k", "-c", "write 700M 1M", str(path))
    return path


def test_truncation_anywhere_is_an_error(written, tmp_path):
    content = written.read_bytes()
    cut = tmp_path / "cut"
    for length in [0, 3, 50, 103, 4096, *range(CLUSTER, len(content), CLUSTER), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(MachineError):
            list(clusters(cut))


@pytest.mark.parametrize(
    ("offset", "data", "problem"),
    [
        (0, b"QCOW", "no qcow2"),
        (4, struct.pack(">I", 2), "version 3"),
        (8, struct.pack(">Q", 512), "backing file"),
        (20, struct.pack(">I", 40), "cluster size"),
        (24, struct.pack(">Q", 1 << 60), "disk size"),
        (24, struct.pack(">Q", 1 << 42), "too short"),
        (32, struct.pack(">I", 2), "encrypted"),
        (40, struct.pack(">Q", 77), "aligned"),
        (40, struct.pack(">Q", 1 << 50), "outside the file"),
        (72, struct.pack(">Q", 1), "cleanly"),
        (72, struct.pack(">Q", 4), "features"),
        (100, struct.pack(">I", 72), "header is too short"),
        (3 * CLUSTER, struct.pack(">Q", 1 << 48), "outside the file"),
        (3 * CLUSTER, struct.pack(">Q", 4 * CLUSTER + 512), "aligned"),
    ],
)
def test_hostile_headers_and_tables(written, offset, data, problem):
    with written.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    with pytest.raises(MachineError, match=problem):
        list(clusters(written))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_make_it_fail_in_another_way(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "f.qcow2"
    create_overlay(path, 1 << 30)
    with path.open("r+b") as file:
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.sampled_from([0, 3 * CLUSTER]))
            file.seek(place + data.draw(st.integers(0, 111)))
            file.write(data.draw(st.binary(min_size=1, max_size=8)))
    try:
        extents = list(clusters(path))
    except MachineError:
        return
    size = path.stat().st_size
    for extent in extents:
        assert extent.kind == "zero" or extent.host_offset + extent.length <= size
        assert extent.guest_offset + extent.length <= virtual_size(path)


BLOCKS = st.dictionaries(st.integers(0, (1 << 30) // CLUSTER), st.booleans(), max_size=40)


@settings(max_examples=15, deadline=None)
@given(BLOCKS)
def test_a_written_overlay_is_what_qemu_reads(tmp_path_factory, blocks):
    directory = tmp_path_factory.mktemp("written")
    path, flat = directory / "o.qcow2", directory / "flat"
    size = (1 << 30) + 512  # the last cluster is a short one
    data = sorted(number for number, is_data in blocks.items() if is_data)
    with write_overlay(path, size, data=data, zeros=blocks.keys() - set(data)) as write:
        for number in reversed(data):
            length = min(CLUSTER, size - number * CLUSTER)
            write(number, memoryview(number.to_bytes(4, "big") * (length // 4)))
    qemu("qemu-img", "check", str(path))
    found = {}
    for extent in clusters(path):
        for offset in range(0, extent.length, CLUSTER):
            found[(extent.guest_offset + offset) // CLUSTER] = extent.kind == "data"
    assert found == blocks
    qemu("qemu-img", "convert", "-O", "raw", str(path), str(flat))
    with flat.open("rb") as stream:
        for number in blocks:
            stream.seek(number * CLUSTER)
            length = min(CLUSTER, size - number * CLUSTER)
            content = number.to_bytes(4, "big") if number in data else bytes(4)
            assert stream.read(length) == content * (length // 4)


def test_clusters_that_cannot_be_are_refused(tmp_path):
    for data, zeros in (((16,), ()), ((), (-1,)), ((3,), (3,))):
        with (
            pytest.raises(ValueError, match="cluster"),
            write_overlay(tmp_path / "o", 1 << 20, data=data, zeros=zeros),
        ):
            pass
    assert not (tmp_path / "o").exists()
