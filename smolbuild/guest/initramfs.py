"""The initramfs: the agent as ``/init``, the kernel's modules and the list of their order.

A deterministic ``newc`` cpio archive (Linux, driver-api/early-userspace/buffer-format),
written here: same agent and modules, same bytes, on any host.
"""

from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes, digest_value
from smolbuild.core.files import write_atomic
from smolbuild.core.values import dataclass
from smolbuild.guest.agent_source import agent_digest
from smolbuild.guest.kernel import Kernel

__all__ = ["MODULE_LIST", "Entry", "build_initramfs", "cpio", "initramfs_key"]

MODULE_LIST = "modules.list"
"""One module path per line, in load order; read by the agent."""

_DIRECTORY = 0o040755
_PROGRAM = 0o100755
_FILE = 0o100644
_CONSOLE = 0o020600


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One member of the archive; ``device`` is (major, minor) of a device node."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def build_initramfs(kernel: Kernel, agent: Path, target: Path) -> Digest:
    """Write the initramfs of ``kernel`` and ``agent`` to ``target`` and return its digest.

    Atomic and idempotent: the bytes depend on the content of the modules and of the agent only.

    Raises:
        OSError: a module or the agent cannot be read, or the target cannot be written.

    """
    data = cpio(_entries(kernel, agent))
    digest = digest_bytes(data)
    if not target.exists() or digest_bytes(target.read_bytes()) != digest:
        write_atomic(target, data, mode=0o644)
    return digest


def initramfs_key(kernel: Digest) -> Digest:
    """Return what stands for the initramfs in a provenance key: all that its content follows from.

    The archive itself holds the compiled agent, whose bytes differ between compiler versions though
    its meaning does not; two hosts agree on this digest whatever compiler they have. ``kernel`` is
    the kernel's digest in the same key.
    """
    return digest_value("smolbuild.initramfs.v1", {"kernel": kernel, "agent": agent_digest()})


def cpio(entries: tuple[Entry, ...]) -> bytes:
    """Return the ``newc`` archive of ``entries``, sorted by name; owner root, all times zero.

    Raises:
        ValueError: two entries have one name, or a name is empty or absolute.

    """
    ordered = sorted(entries, key=lambda entry: entry.name.encode())
    names = [entry.name for entry in ordered]
    if len(set(names)) != len(names) or any(not n or n.startswith("/") for n in names):
        raise ValueError("archive names must be unique, relative and not empty")
    parts = [_member(entry, inode) for inode, entry in enumerate(ordered, start=1)]
    parts.append(_member(Entry(name="TRAILER!!!", mode=0), 0))
    archive = b"".join(parts)
    return archive + b"\0" * (-len(archive) % 512)


def _entries(kernel: Kernel, agent: Path) -> tuple[Entry, ...]:
    return (
        Entry(name="dev", mode=_DIRECTORY),
        Entry(name="dev/console", mode=_CONSOLE, device=(5, 1)),
        Entry(name="init", mode=_PROGRAM, data=agent.read_bytes()),
        Entry(name="modules", mode=_DIRECTORY),
        *_modules(kernel),
    )


def _modules(kernel: Kernel) -> Iterator[Entry]:
    for path in kernel.modules:
        yield Entry(name=f"modules/{path.name}", mode=_FILE, data=path.read_bytes())
    listed = "".join(f"/modules/{path.name}\n" for path in kernel.modules)
    yield Entry(name=MODULE_LIST, mode=_FILE, data=listed.encode())


def _member(entry: Entry, inode: int) -> bytes:
    name = entry.name.encode() + b"\0"
    links = 2 if entry.mode & 0o170000 == 0o040000 else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % value for value in fields) + name
    return header + b"\0" * (-len(header) % 4) + entry.data + b"\0" * (-len(entry.data) % 4)
