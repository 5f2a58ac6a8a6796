"""Modules in dependency order, from their own ELF sections."""

import gzip
import lzma
import struct
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.errors import HostError
from smolbuild.guest.kernel import module_dependencies, module_name, order_modules, plain_module


def elf_module(*depends: str) -> bytes:
    """Return the least of an ELF64 module: a header, two sections, three section headers."""
    info = b"license=GPL\0depends=" + ",".join(depends).encode() + b"\0vermagic=6\0"
    names = b"\0.modinfo\0.shstrtab\0"
    start = 64
    table = start + len(info) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2
    )
    sections = b"\0" * 64
    for name, at, size in ((1, start, len(info)), (10, start + len(info), len(names))):
        sections += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0)
    return header + info + names + sections


def available(directory: Path, **modules: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for name, depends in modules.items():
        path = directory / f"{name}.ko"
        path.write_bytes(elf_module(*depends))
        found[name] = path
    return found


def test_dependencies_are_read_with_underscores() -> None:
    assert module_dependencies("x", elf_module("virtio-ring", "virtio")) == (
        "virtio_ring",
        "virtio",
    )
    assert module_dependencies("x", elf_module()) == ()


def test_each_module_comes_after_what_it_needs(tmp_path: Path) -> None:
    files = available(tmp_path, net=("failover", "virtio"), failover=(), virtio=("ring",), ring=())
    ordered = order_modules(("net", "virtio"), files, frozenset())
    assert [path.stem for path in ordered] == ["failover", "ring", "virtio", "net"]


def test_what_is_built_in_is_left_out(tmp_path: Path) -> None:
    files = available(tmp_path, net=("virtio",))
    assert order_modules(("net", "blk"), files, {"virtio", "blk"}) == (files["net"],)


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    files = available(tmp_path, net=("virtio",))
    with pytest.raises(HostError, match="virtio") as caught:
        order_modules(("net",), files, frozenset())
    assert caught.value.hint


def test_a_circle_is_an_error(tmp_path: Path) -> None:
    files = available(tmp_path, a=("b",), b=("a",))
    with pytest.raises(HostError, match="circle"):
        order_modules(("a",), files, frozenset())


@given(st.binary(max_size=300))
def test_garbage_is_no_module(data: bytes) -> None:
    with pytest.raises(HostError):
        module_dependencies("x", data)


@given(st.integers(0, len(elf_module("a")) - 1), st.integers(0, 255))
def test_a_damaged_module_is_an_error_or_a_module(at: int, value: int) -> None:
    data = bytearray(elf_module("a", "b"))
    data[at] = value
    try:
        module_dependencies("x", bytes(data))
    except HostError as error:
        seen = error.message
    else:
        seen = "x"
    assert "x" in seen


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("", bytes),
        (".xz", lzma.compress),
        (".gz", gzip.compress),
        (".zst", zstandard.ZstdCompressor().compress),
    ],
)
def test_compressed_modules_are_unpacked(suffix: str, pack: object) -> None:
    data = elf_module("a") * 50
    assert plain_module("m.ko" + suffix, pack(data)) == data  # type: ignore[operator]
    if suffix:
        with pytest.raises(HostError, match="damaged"):
            plain_module("m.ko" + suffix, b"no such format")


def test_module_names() -> None:
    assert module_name("kernel/drivers/virtio-rng.ko.xz") == "virtio_rng"
    assert module_name("a.ko") == "a"
    assert module_name("modules.builtin") is None
    assert module_name(".ko") is None
