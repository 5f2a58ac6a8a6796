"""The ext4 reader: what our writer and mke2fs wrote, dirty journals, and hostile images."""

import os
import random
import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_trees import debugfs, fsck, trees

from smolbuild.core.errors import BuildError, SmolbuildError, VerificationError
from smolbuild.source.content import BytesBacking, Content, Segment, bytes_content
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.ext4_owners import PlaceKind
from smolbuild.source.ext4_reader import Ext4, open_disk
from smolbuild.source.tree import Kind, Node, Tree

MIB = 1 << 20
SIZE = 16 * MIB


def facts(tree: Tree) -> dict[bytes, tuple[object, ...]]:
    """Return all that is known of a tree by path; hard links show by the first path of a file."""
    names: dict[int, bytes] = {}
    found = {}
    for path, node in tree.walk():
        content = node.content.read(0, node.content.size) if node.kind is Kind.FILE else b""
        found[path] = (
            node.kind, node.mode, node.uid, node.gid, node.xattrs, node.target, node.device,
            content, min(max(node.mtime, 0), 2**31 - 1), names.setdefault(id(node), path),
        )  # fmt: skip
    return found


@given(trees())
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_the_writer_wrote_is_read_back(tmp_path, tree):
    image = tmp_path / "root.img"
    write_ext4(tree, image, SIZE)
    with open_disk(image) as disk:
        found = facts(disk.tree())
    wanted = facts(tree)
    root, lost = found.pop(b""), found.pop(b"lost+found")
    assert root[:2] == wanted.pop(b"")[:2]
    assert lost[0] is Kind.DIRECTORY
    assert found == wanted


def test_walk_gives_names_in_order_parents_first(tmp_path):
    tree = Tree()
    tree.put(b"b/z", b"1")
    tree.put(b"b/a", b"22")
    tree.put(b"a", b"333")
    tree.root.children[b"c"] = tree.find(b"a")
    write_ext4(tree, tmp_path / "i", SIZE)
    with open_disk(tmp_path / "i") as disk:
        nodes = list(disk.walk())
        paths = [node.path for node in nodes]
        assert paths == [b"/", b"/a", b"/b", b"/b/a", b"/b/z", b"/c", b"/lost+found"]
        assert (nodes[1].ino, nodes[1].links, nodes[1].size) == (nodes[5].ino, 2, 3)
        assert b"".join(disk.content(nodes[3])) == b"22"


def test_holes_are_zeros_and_deep_extent_trees_are_followed(tmp_path):
    """Every second block is a hole: 1,500 extents, so three levels."""
    blocks = 1500
    segments = tuple(Segment(2 * i * 4096, i * 4096, 4096) for i in range(blocks))
    data = b"".join(struct.pack("<I", i + 1) * 1024 for i in range(blocks))
    content = Content(2 * blocks * 4096 + 123, BytesBacking(data), segments)
    tree = Tree()
    tree.root.children[b"holes"] = Node(kind=Kind.FILE, content=content)
    write_ext4(tree, tmp_path / "i", 32 * MIB)
    with open_disk(tmp_path / "i") as disk:
        node = next(node for node in disk.walk() if node.path == b"/holes")
        assert b"".join(disk.content(node)) == content.read(0, content.size)
        assert len(disk.content_of(node).segments) == blocks


def _made_by_mke2fs(directory: Path, *options: str, size: str = "64M") -> Path:
    """Return an image of a directory with the usual kinds of files, many names in one of them."""
    source = directory / "source"
    if not source.exists():
        (source / "many").mkdir(parents=True)
        for index in range(1200):
            (source / "many" / f"a-rather-long-name-{index:06}").write_bytes(b"%d" % index)
        (source / "short").symlink_to("many")
        (source / "long").symlink_to("x" * 100)
        (source / "tiny").write_bytes(b"t" * 50)
        (source / "small").write_bytes(b"s" * 140)
        (source / "big").write_bytes(random.Random(1).randbytes(3 * MIB + 5))
        with (source / "sparse").open("wb") as file:
            file.seek(20 * MIB)
            file.write(b"end")
        (source / "tiny").chmod(0o4750)
        os.link(source / "small", source / "other")
        os.mkfifo(source / "pipe")
    image = directory / "image"
    image.unlink(missing_ok=True)
    command = ["mke2fs", "-q", "-t", "ext4", *options, "-d", str(source), str(image), size]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return image


_VARIANTS = [
    ("-b", "1024"),
    ("-b", "4096"),
    ("-b", "2048", "-I", "128"),
    ("-b", "4096", "-O", "inline_data,64bit,metadata_csum", "-I", "512"),
    ("-O", "^extents,^64bit,^flex_bg,^metadata_csum"),
    ("-O", "sparse_super2,^resize_inode,^has_journal"),
    ("-O", "uninit_bg,^metadata_csum,large_dir,quota,project"),
    ("-O", "^dir_index,^filetype", "-N", "4096"),
]


@pytest.mark.parametrize("options", _VARIANTS, ids=" ".join)
@pytest.mark.parametrize("indexed", [False, True])
def test_what_mke2fs_wrote_is_read(tmp_path, options, indexed):
    image = _made_by_mke2fs(tmp_path, *options)
    if indexed:  # packs directories and gives the large one a hash tree
        subprocess.run(["e2fsck", "-fyD", str(image)], capture_output=True, check=False, timeout=60)
        assert fsck(image) == ""
    source = tmp_path / "source"
    with open_disk(image) as disk:
        nodes = {node.path: node for node in disk.walk()}
        assert len(nodes) == 1200 + 11  # the nine others, the root, lost+found
        for index in range(0, 1200, 97):
            node = nodes[b"/many/a-rather-long-name-%06d" % index]
            assert b"".join(disk.content(node)) == b"%d" % index
        for name in ("tiny", "small", "big", "sparse", "other"):
            node, status = nodes[f"/{name}".encode()], (source / name).stat()
            assert b"".join(disk.content(node)) == (source / name).read_bytes()
            assert (node.mode, node.links) == (status.st_mode & 0o7777, status.st_nlink)
            assert node.mtime == int(status.st_mtime)
        assert nodes[b"/small"].ino == nodes[b"/other"].ino
        assert nodes[b"/short"].target == b"many"
        assert nodes[b"/long"].target == b"x" * 100
        assert nodes[b"/pipe"].kind is Kind.FIFO


@pytest.mark.parametrize("options", _VARIANTS, ids=" ".join)
def test_every_block_has_the_owner_that_debugfs_says(tmp_path, options):
    image = _made_by_mke2fs(tmp_path, *options)
    size = int(re.search(r"Block size: +(\d+)", debugfs(image, "stats"))[1])
    count = image.stat().st_size // size
    rng = random.Random(2)
    blocks = sorted({*range(min(count, 700)), *(rng.randrange(count) for _ in range(1500))})
    batches = (blocks[at : at + 100] for at in range(0, len(blocks), 100))
    asked = debugfs(image, *(f"icheck {' '.join(map(str, batch))}" for batch in batches))
    inodes = dict(re.findall(r"(?m)^(\d+)\t(\d+)$", asked))
    tested = debugfs(image, *(f"testb {block}" for block in blocks))
    used = {int(n) for n in re.findall(r"Block (\d+) marked in use", tested)}
    paths = _paths(image, set(inodes.values()))
    with open_disk(image) as disk:
        places = disk.owners_of([block * size for block in blocks])
    for block in blocks:
        place = places[block * size]
        inode = inodes.get(str(block))
        if inode in paths:
            wanted = (PlaceKind.FILE, PlaceKind.DIRECTORY, PlaceKind.METADATA)
            assert (place.path in paths[inode], place.kind in wanted) == (True, True), block
        elif inode == "8":
            assert place.kind is PlaceKind.JOURNAL, block
        elif block in used or block == 0:
            assert place.kind is PlaceKind.METADATA, block
        else:
            assert place.kind is PlaceKind.FREE, block


def _paths(image: Path, inodes: set[str]) -> dict[str, set[bytes]]:
    shown = debugfs(image, f"ncheck {' '.join(sorted(inodes))}") if inodes else ""
    found: dict[str, set[bytes]] = {"2": {b"/"}}
    for inode, path in re.findall(r"(?m)^(\d+)\t(/.*)$", shown):
        found.setdefault(inode, set()).add(path.replace("//", "/").encode())
    return found


def test_the_owner_of_an_inode_and_of_its_attributes(tmp_path):
    tree = Tree()
    for index in range(40):
        tree.put(b"d/%d" % index, b"x")
    tree.find(b"d/7").xattrs[b"user.a"] = b"v" * 2000
    write_ext4(tree, tmp_path / "i", SIZE)
    data = (tmp_path / "i").read_bytes()
    with open_disk(tmp_path / "i") as disk:
        at = data.index(b"v" * 2000)
        place = disk.owners_of([at])[at]
        assert (place.kind, place.path, str(place)) == (
            PlaceKind.METADATA, b"/d/7", "inode of /d/7"
        )  # fmt: skip
        inode = next(node.ino for node in disk.walk() if node.path == b"/d/7")
        offset = int(
            re.search(r"offset 0x([0-9a-f]+)", debugfs(tmp_path / "i", "imap /d/7"))[1], 16
        )
        block = int(re.search(r"block (\d+)", debugfs(tmp_path / "i", f"imap <{inode}>"))[1])
        place = disk.owners_of([block * 4096 + offset + 5])[block * 4096 + offset + 5]
        assert place.path == b"/d/7"
        assert disk.owners_of([1 << 40, -1])[-1].kind is PlaceKind.OUTSIDE


def test_attributes_and_late_times_as_debugfs_sets_them(tmp_path):
    image = _made_by_mke2fs(tmp_path, "-b", "4096")
    entries = [(1, 7, -1), (2, 6, 1000), (4, 5, -1), (16, 7, -1), (32, 4, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *item) for item in entries)
    (tmp_path / "value").write_bytes(value)
    (tmp_path / "large").write_bytes(b"L" * 3000)
    debugfs(
        image,
        f"ea_set -f {tmp_path / 'value'} /tiny system.posix_acl_access",
        f"ea_set -f {tmp_path / 'large'} /tiny user.large",
        "ea_set /short trusted.t yes",
        "ea_set /pipe security.s x",
        "sif /tiny mtime_lo 705032704",
        "sif /tiny mtime_extra 1",
        write=True,
    )
    with open_disk(image) as disk:
        nodes = {node.path: node for node in disk.walk()}
    assert nodes[b"/tiny"].mtime == 5_000_000_000
    found = {path: node.xattrs for path, node in nodes.items()}
    assert found[b"/tiny"] == {b"system.posix_acl_access": value, b"user.large": b"L" * 3000}
    assert found[b"/short"] == {b"trusted.t": b"yes"}
    assert found[b"/pipe"] == {b"security.s": b"x"}


# --- the journal ---------------------------------------------------------------------------------


def _image_with_file(tmp_path: Path, *options: str) -> tuple[Path, int, bytes]:
    image = _made_by_mke2fs(tmp_path, "-b", "4096", *options, size="32M")
    block = int(debugfs(image, "bmap /big 1").splitlines()[1])
    return image, block, (tmp_path / "source" / "big").read_bytes()


def _read(image: Path, name: bytes) -> bytes:
    with open_disk(image) as disk:
        node = next(node for node in disk.walk() if node.path == name)
        return b"".join(disk.content(node))


@pytest.mark.parametrize(
    ("features", "checksums"),
    [("64bit", "-c"), ("64bit", ""), ("^64bit", "-c"), ("^64bit,^metadata_csum", "")],
)
def test_a_dirty_journal_is_replayed(tmp_path, features, checksums):
    """debugfs writes transactions into the journal, as a mounted file system would."""
    image, block, big = _image_with_file(tmp_path, "-O", features)
    new = {name: random.Random(name).randbytes(4096) for name in ("one", "two", "magic", "open")}
    new["magic"] = b"\xc0\x3b\x39\x98" + new["magic"][4:]  # must be escaped in the journal
    for name, data in new.items():
        (tmp_path / name).write_bytes(data)
    debugfs(
        image,
        f"jo {checksums}",
        f"jw -b {block} {tmp_path / 'one'}",
        f"jw -b {block + 1} {tmp_path / 'magic'}",
        f"jw -b {block + 2} {tmp_path / 'two'}",
        f"jw -r {block + 2}",
        f"jw -b {block} {tmp_path / 'two'}",
        f"jw -c -b {block + 3} {tmp_path / 'open'}",
        "jc",
        write=True,
    )
    expected = bytearray(big)
    expected[4096:8192] = new["two"]
    expected[8192:12288] = new["magic"]
    with open_disk(image) as disk:
        assert disk.journal_blocks == 2
    assert _read(image, b"/big") == expected
    before = image.read_bytes()
    subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, check=False, timeout=60)
    assert image.read_bytes() != before, "e2fsck had nothing to replay"
    debugfs(image, f"dump /big {tmp_path / 'replayed'}")
    assert (tmp_path / "replayed").read_bytes() == expected, "e2fsck and we differ"


def test_a_block_written_again_after_its_revocation_counts(tmp_path):
    image, block, big = _image_with_file(tmp_path)
    (tmp_path / "old").write_bytes(b"o" * 4096)
    (tmp_path / "new").write_bytes(b"n" * 4096)
    jw = [
        f"jw -b {block} {tmp_path / 'old'}",
        f"jw -r {block}",
        f"jw -b {block} {tmp_path / 'new'}",
    ]
    debugfs(image, "jo -c", *jw, "jc", write=True)
    assert _read(image, b"/big") == big[:4096] + b"n" * 4096 + big[8192:]


def test_a_log_that_wraps_around(tmp_path):
    """A small journal, filled from shortly before its end."""
    image, block, big = _image_with_file(tmp_path, "-J", "size=4")
    start = _journal(image)
    data = bytearray(image.read_bytes())
    blocks = struct.unpack_from(">I", data, start + 0x10)[0]
    size = 4096

    def header(kind: int, sequence: int) -> bytes:
        return struct.pack(">4sII", b"\xc0\x3b\x39\x98", kind, sequence)

    content = [bytes([65 + i]) * size for i in range(3)]
    tags = b"".join(
        struct.pack(">IHH", block + i, 0, (2 if i else 0) | (8 if i == 2 else 0))
        + (b"" if i else bytes(16))
        for i in range(3)
    )
    log = [(header(1, 7) + tags).ljust(size, b"\0"), *content, header(2, 7).ljust(size, b"\0")]
    places = [blocks - 2, blocks - 1, 1, 2, 3]
    for place, item in zip(places, log, strict=True):
        at = _journal(image, place)
        data[at : at + size] = item
    struct.pack_into(">III", data, start + 0x14, 1, 7, blocks - 2)
    struct.pack_into(">III", data, start + 0x24, 0, 0, 0)
    struct.pack_into("<I", data, 1024 + 0x60, struct.unpack_from("<I", data, 1024 + 0x60)[0] | 4)
    image.write_bytes(data)
    assert _read(image, b"/big") == big[:size] + b"".join(content) + big[4 * size :]


def _journal(image: Path, block: int = 0) -> int:
    return int(debugfs(image, f"bmap <8> {block}").splitlines()[1]) * 4096


def test_a_journal_copy_without_its_checksum_is_refused(tmp_path):
    image, block, _ = _image_with_file(tmp_path)
    (tmp_path / "new").write_bytes(b"n" * 4096)
    debugfs(image, "jo -c", f"jw -b {block} {tmp_path / 'new'}", "jc", write=True)
    data = bytearray(image.read_bytes())
    at = data.index(b"n" * 4096, _journal(image))
    data[at + 9] ^= 1
    image.write_bytes(data)
    with pytest.raises(VerificationError, match=f"block {block:,} does not have its checksum"):
        _read(image, b"/big")


def test_the_journal_of_an_unmounted_file_system_does_not_count(tmp_path):
    image, block, big = _image_with_file(tmp_path)
    (tmp_path / "new").write_bytes(b"n" * 4096)
    debugfs(image, "jo", f"jw -b {block} {tmp_path / 'new'}", "jc", write=True)
    data = bytearray(image.read_bytes())
    struct.pack_into("<I", data, 1024 + 0x60, struct.unpack_from("<I", data, 1024 + 0x60)[0] & ~4)
    image.write_bytes(data)
    assert _read(image, b"/big") == big


# --- damage --------------------------------------------------------------------------------------


def test_what_is_no_file_system(tmp_path):
    image = tmp_path / "i"
    for data in (b"", b"x" * 100, bytes(8192)):
        image.write_bytes(data)
        with pytest.raises(VerificationError, match="no ext4 superblock"), open_disk(image):
            pass
    with pytest.raises(BuildError, match="No such file"), open_disk(tmp_path / "missing"):
        pass


@pytest.mark.parametrize(
    "option", ["bigalloc", "encrypt", "casefold", "meta_bg,^resize_inode", "mmp"]
)
def test_features_that_are_not_read_are_named(tmp_path, option):
    image = _made_by_mke2fs(tmp_path, "-O", option)
    with pytest.raises(BuildError, match=option.partition(",")[0]), open_disk(image):
        pass


def test_a_disk_cut_short(tmp_path):
    image = _made_by_mke2fs(tmp_path)
    os.truncate(image, 30 * MIB)
    with pytest.raises(VerificationError, match="contradict"), open_disk(image):
        pass


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("d/below", "two parents"),  # its own grandparent
        ("d/free", "not in use"),
    ],
)
def test_directories_in_a_circle_and_names_of_nothing(tmp_path, target, message):
    tree = Tree()
    tree.put(b"d/below/file", b"")
    write_ext4(tree, tmp_path / "i", SIZE)
    inode = re.search(r"Inode: (\d+)", debugfs(tmp_path / "i", "stat /d"))[1]
    number = inode if target == "d/below" else "60"
    subprocess.run(
        ["debugfs", "-w", "-R", f"link <{number}> /{target}/again", str(tmp_path / "i")]
        if target == "d/below"
        else ["debugfs", "-w", "-R", f"link <{number}> /d/again", str(tmp_path / "i")],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    with open_disk(tmp_path / "i") as disk, pytest.raises(VerificationError, match=message):
        list(disk.walk())


def _use_everything(read, size: int) -> None:
    disk = Ext4(read, size)
    left = 200 * MIB
    for node in disk.walk():
        if node.kind is Kind.FILE:
            content = disk.content_of(node)
            for start, end in content.spans(4096):
                left -= end - start
                content.read(start, min(end - start, MIB))
            assert left > 0 or content.size > 64 * MIB
    disk.owners_of(range(0, size, 40_000))


@pytest.fixture(scope="module")
def victims(tmp_path_factory) -> list[bytes]:
    directory = tmp_path_factory.mktemp("victims")
    found = []
    for options in (("-O", "inline_data"), ("-O", "^extents,^64bit"), ("-b", "1024")):
        image = _made_by_mke2fs(directory, *options, size="32M")
        (directory / "new").write_bytes(b"n" * int(options[1] if options[0] == "-b" else 4096))
        debugfs(image, "jo -c", f"jw -b 2000,2001 {directory / 'new'}", "jc", write=True)
        found.append(image.read_bytes())
    return found


@given(st.data())
@settings(max_examples=120, deadline=10_000)
def test_damaged_images_give_errors_and_never_hang(victims, data):
    """Numbers are changed where metadata stands: every answer is a result or one of our errors."""
    victim = data.draw(st.sampled_from(victims))
    image = bytearray(victim)
    used = _metadata_places(victim)
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.sampled_from(used)) + data.draw(st.integers(0, 255)) * 4
        value = data.draw(st.sampled_from([0, 1, 2, 0xFFFF, 0xFFFFFFFF, 0x7FFFFFFF, at // 4096]))
        width = data.draw(st.sampled_from([1, 2, 4]))
        image[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    view = bytes(image)
    try:
        _use_everything(lambda offset, length: view[offset : offset + length], len(view))
    except (VerificationError, BuildError):
        pass
    except SmolbuildError as error:
        pytest.fail(f"an error of another kind: {error!r}")


_PLACES: dict[int, list[int]] = {}


def _metadata_places(image: bytes) -> list[int]:
    if id(image) not in _PLACES:
        disk = Ext4(lambda offset, length: image[offset : offset + length], len(image))
        grain = 1024
        offsets = [at for at in range(0, len(image), grain) if any(image[at : at + grain])]
        places = disk.owners_of(offsets)
        wanted = (PlaceKind.METADATA, PlaceKind.DIRECTORY, PlaceKind.JOURNAL)
        _PLACES[id(image)] = [at for at in offsets if places[at].kind in wanted]
    return _PLACES[id(image)]


def test_many_files_are_read_in_a_few_seconds(tmp_path):
    """The budget is generous: machines are shared. Measured when written: about 1 s for 30,000."""
    import time

    tree = Tree()
    for index in range(30_000):
        tree.put(b"d%d/e%d/f%d" % (index % 50, index % 7, index), b"x" * (index % 100))
    write_ext4(tree, tmp_path / "i", 256 * MIB)
    started = time.process_time()
    with open_disk(tmp_path / "i") as disk:
        found = sum(len(b"".join(disk.content(n))) for n in disk.walk() if n.kind is Kind.FILE)
        disk.owners_of([0])
    seconds = time.process_time() - started
    assert found == sum(index % 100 for index in range(30_000))
    assert seconds < 12, seconds


def test_an_empty_file_and_content_of_other_kinds(tmp_path):
    tree = Tree()
    tree.root.children[b"f"] = Node(kind=Kind.FILE, content=bytes_content(b""))
    tree.root.children[b"p"] = Node(kind=Kind.FIFO)
    write_ext4(tree, tmp_path / "i", SIZE)
    with open_disk(tmp_path / "i") as disk:
        assert [b"".join(disk.content(n)) for n in disk.walk() if n.path in (b"/f", b"/p")] == [
            b"", b""
        ]  # fmt: skip
