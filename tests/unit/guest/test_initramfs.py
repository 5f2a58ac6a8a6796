"""The initramfs: deterministic, and read back by an implementation that is not ours."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.digest import Digest, digest_bytes, digest_file
from smolbuild.guest.initramfs import Entry, build_initramfs, cpio, initramfs_key
from smolbuild.guest.kernel import Kernel


def kernel_of(directory: Path, *names: str) -> Kernel:
    directory.mkdir(parents=True, exist_ok=True)
    modules = []
    for name in names:
        path = directory / f"{name}.ko"
        path.write_bytes(name.encode() * 100)
        modules.append(path)
    return Kernel(
        package="p",
        version="1",
        vmlinuz=directory / "vmlinuz",
        modules=tuple(modules),
        digest=Digest("sha256:" + "1" * 64),
        content=Digest("sha256:" + "2" * 64),
    )


def test_same_content_same_bytes_whatever_the_paths_times_and_umask(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_bytes(b"program")
    first = build_initramfs(kernel_of(tmp_path / "a", "zz", "aa"), agent, tmp_path / "one")
    moved = tmp_path / "agent2"
    shutil.copy(agent, moved)
    os.utime(moved, (1, 1))
    before = os.umask(0o077)
    try:
        second = build_initramfs(kernel_of(tmp_path / "b", "zz", "aa"), moved, tmp_path / "two")
    finally:
        os.umask(before)
    assert first == second == digest_file(tmp_path / "one") == digest_file(tmp_path / "two")
    other = build_initramfs(kernel_of(tmp_path / "c", "aa", "zz"), agent, tmp_path / "three")
    assert other != first  # the order of modules is content


def test_it_holds_the_agent_and_the_modules_in_their_order(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_bytes(b"program")
    build_initramfs(kernel_of(tmp_path / "m", "virtio_ring", "virtio"), agent, tmp_path / "out")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    with (tmp_path / "out").open("rb") as stream:
        done = subprocess.run(
            ["cpio", "-id", "--no-absolute-filenames", "init", "modules/*", "modules.list"],
            stdin=stream,
            cwd=unpacked,
            capture_output=True,
            timeout=20,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert (unpacked / "init").read_bytes() == b"program"
    assert (unpacked / "init").stat().st_mode & 0o777 == 0o755
    assert (unpacked / "modules.list").read_text() == (
        "/modules/virtio_ring.ko\n/modules/virtio.ko\n"
    )
    assert (unpacked / "modules" / "virtio.ko").read_bytes() == b"virtio" * 100


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,9}(/[a-z]{1,9})?", fullmatch=True), st.binary(max_size=50)
    )
)
def test_the_archive_does_not_depend_on_the_order_of_its_entries(files: dict[str, bytes]) -> None:
    entries = [Entry(name=name, mode=0o100644, data=data) for name, data in files.items()]
    assert cpio(tuple(entries)) == cpio(tuple(reversed(entries)))
    assert len(cpio(tuple(entries))) % 512 == 0


@pytest.mark.parametrize("names", [("a", "a"), ("/a",), ("",)])
def test_bad_names_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="unique"):
        cpio(tuple(Entry(name=name, mode=0o100644) for name in names))


def test_the_key_covers_kernel_and_agent_source(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path).digest
    assert initramfs_key(kernel) == initramfs_key(kernel)
    assert initramfs_key(digest_bytes(b"other")) != initramfs_key(kernel)
