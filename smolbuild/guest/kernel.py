"""A kernel as a guest needs it: the image, and the modules for its virtio devices in load order.

The order comes from the modules themselves (the ``depends=`` entry of their ``.modinfo`` section):
distribution packages carry no ``modules.dep``, ``depmod`` makes it at installation.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from smolbuild.core.digest import Digest, digest_file, digest_value
from smolbuild.core.errors import HostError
from smolbuild.core.values import dataclass

__all__ = [
    "GUEST_MODULES",
    "OPTIONAL_MODULES",
    "RECORD",
    "Kernel",
    "builtin_modules",
    "kernel_digest",
    "module_dependencies",
    "module_name",
    "order_modules",
    "package_digest",
    "plain_module",
    "require_x86_64",
]

GUEST_MODULES = ("virtio_mmio", "virtio_blk", "virtio_console", "virtio_net", "virtio_rng")
"""What a guest must be able to drive; what these depend on comes along."""

RECORD = "kernel.json"
"""In a cache entry: digest and module order, so that nothing is hashed when it is used again."""

OPTIONAL_MODULES = ("veth",)
"""What is loaded where the kernel has it: without veth an allow-list needs the proxy variables."""

_SUFFIXES = (".ko", ".ko.xz", ".ko.zst", ".ko.gz")
_MODULE_LIMIT = 64 << 20
"""No module decompresses to more than this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel ready to boot a guest: files on this host and what they are called."""

    package: str
    """Name of the distribution package; empty for a kernel that the user gave as a path."""
    version: str
    """Version of the package; empty for a kernel that the user gave as a path."""
    vmlinuz: Path
    modules: tuple[Path, ...]
    """Uncompressed modules, each after the ones it depends on; empty when all is built in."""
    digest: Digest
    """What it is in a provenance key: what was downloaded, or the content of a given file."""
    content: Digest
    """``kernel_digest`` of the files when they were made."""


def require_x86_64() -> None:
    """Check the host's architecture.

    Raises:
        HostError: it is one whose kernels are not supported.

    """
    machine = os.uname().machine
    if machine not in {"x86_64", "amd64", "AMD64"}:
        raise HostError(
            f"kernels for {machine} are not supported yet, only for x86_64", code="architecture"
        )


def kernel_digest(vmlinuz: Path, modules: tuple[Path, ...]) -> Digest:
    """Return the digest of a kernel: its image and its modules in load order.

    Raises:
        OSError: a file cannot be read.

    """
    return digest_value(
        "smolbuild.kernel.v1",
        {
            "image": digest_file(vmlinuz),
            "modules": [[path.name, digest_file(path)] for path in modules],
        },
    )


def package_digest(sha256: str, modules_sha256: str | None) -> Digest:
    """Return what a packaged kernel is in a provenance key; nothing need be downloaded to know it.

    Args:
        sha256: of the image's package, 64 lower-case hex digits.
        modules_sha256: of the package with its modules, where they come apart.

    """
    return digest_value(
        "smolbuild.kernel-package.v1",
        {"image": sha256, "modules": modules_sha256, "wanted": [*GUEST_MODULES, *OPTIONAL_MODULES]},
    )


def module_name(path: str) -> str | None:
    """Return the kernel's name of the module file ``path`` (``-`` as ``_``), None for others."""
    name = path.rsplit("/", 1)[-1]
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix).replace("-", "_")
    return None


def plain_module(name: str, data: bytes) -> bytes:
    """Return the ELF bytes of the module file called ``name``, decompressed when it is compressed.

    Raises:
        HostError: the compressed data are damaged or far too large.

    """
    if name.endswith(".zst"):
        plain = _unzstd(name, data)
    elif name.endswith((".xz", ".gz")):
        plain = _unpacked(name, data)
    else:
        plain = data
    if len(plain) >= _MODULE_LIMIT:
        raise HostError(f"the kernel module {name} is larger than {_MODULE_LIMIT:,} bytes")
    return plain


def module_dependencies(name: str, data: bytes) -> tuple[str, ...]:
    """Return the names of the modules that the ELF module ``data`` depends on.

    Raises:
        HostError: ``data`` is not a 64-bit little-endian ELF module.

    """
    try:
        info = _section(data, b".modinfo")
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise HostError(f"{name} is not a 64-bit ELF kernel module: {error}") from error
    for entry in info.split(b"\0"):
        if entry.startswith(b"depends="):
            listed = entry.removeprefix(b"depends=").decode("ascii", "replace")
            return tuple(part.replace("-", "_") for part in listed.split(",") if part)
    return ()


def builtin_modules(directory: Path) -> frozenset[str]:
    """Return the names in the file ``modules.builtin`` of ``directory``, if there is one."""
    path = directory / "modules.builtin"
    if not path.is_file():
        return frozenset()
    names = (module_name(line.strip()) for line in path.read_text(errors="replace").splitlines())
    return frozenset(name for name in names if name is not None)


def order_modules(
    wanted: tuple[str, ...],
    available: Mapping[str, Path],
    builtin: AbstractSet[str],
    *,
    optional: tuple[str, ...] = (),
) -> tuple[Path, ...]:
    """Return the files of ``wanted`` and of all they depend on, each after its dependencies.

    Args:
        wanted: module names with ``_``.
        available: uncompressed module files by name.
        builtin: names that are part of the kernel image.
        optional: more names, for which there need be no module.

    Raises:
        HostError: a module is neither available nor built in, or the modules depend on each other
            in a circle.

    """
    ordered: dict[str, Path] = {}
    pending: list[str] = []

    def visit(name: str) -> None:
        if name in builtin or name in ordered:
            return
        if name in pending:
            raise HostError(f"kernel modules depend in a circle: {' → '.join([*pending, name])}")
        if name not in available:
            raise HostError(
                f"the kernel has no module {name}, and it is not built in",
                hint="use a kernel with virtio-mmio, -blk, -console, -net and -rng",
                code="kernel-modules",
            )
        pending.append(name)
        path = available[name]
        for dependency in module_dependencies(path.name, path.read_bytes()):
            visit(dependency)
        pending.pop()
        ordered[name] = path

    for name in (*wanted, *(name for name in optional if name in available)):
        visit(name)
    return tuple(ordered.values())


def _unpacked(name: str, data: bytes) -> bytes:
    import lzma
    import zlib

    try:
        if name.endswith(".xz"):
            return lzma.LZMADecompressor(memlimit=256 << 20).decompress(data, _MODULE_LIMIT)
        return zlib.decompressobj(wbits=31).decompress(data, _MODULE_LIMIT)
    except (lzma.LZMAError, zlib.error) as error:
        raise HostError(f"the kernel module {name} is damaged: {error}") from error


def _unzstd(name: str, data: bytes) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            return stream.read(_MODULE_LIMIT)
    except zstandard.ZstdError as error:
        raise HostError(f"the kernel module {name} is damaged: {error}") from error


def _section(data: bytes, wanted: bytes) -> bytes:
    """Return the content of the ELF64 section called ``wanted`` (System V ABI, chapter 4)."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF64 little-endian header")
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if size != 64 or names_index >= count:
        raise ValueError("bad section table")
    headers = list(_headers(data, offset, count))
    names = _content(data, headers[names_index])
    for header in headers:
        end = names.find(b"\0", header[0])
        if names[header[0] : end] == wanted:
            return _content(data, header)
    raise ValueError(f"no {wanted.decode()} section")


def _headers(data: bytes, offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    for index in range(count):
        name, _, _, _, start, length = struct.unpack_from("<IIQQQQ", data, offset + index * 64)
        yield name, start, length


def _content(data: bytes, header: tuple[int, int, int]) -> bytes:
    _, start, length = header
    if start + length > len(data):
        raise ValueError("a section lies outside the file")
    return data[start : start + length]
