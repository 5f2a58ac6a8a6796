"""Read the control data of a ``.deb`` (``deb(5)``: an ar archive with a compressed control.tar)."""

import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.errors import BuildError
from smolbuild.source.content import BytesBacking, FileBacking, Region
from smolbuild.source.tar import read_tar

__all__ = ["Deb", "read_deb"]

_MAGIC = b"!<arch>\n"
_HEADER = 60
_MAX_CONTROL = 16 << 20
_MAX_MEMBERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Deb:
    """What a package says of itself."""

    control: str
    """Its control stanza, without trailing newlines."""
    fields: Mapping[str, str]
    """One-line fields by name."""
    epoch: int
    """When it was built, in seconds since the epoch; nothing in it is newer."""


def read_deb(path: Path) -> Deb:
    """Return the control data of the package at ``path``.

    Raises:
        BuildError: it is no Debian package, or damaged.
        OSError: it cannot be read.

    """
    try:
        with FileBacking(path) as backing:
            epoch = 0
            for name, time, region in _members(backing):
                epoch = max(epoch, time)
                if name.startswith("control.tar"):
                    control = _control(region, name)
                    return Deb(control=control, fields=_fields(control), epoch=epoch)
    except (lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        raise BuildError(f"{path} is damaged: {error}") from error
    raise BuildError(f"{path} is not a Debian package")


def _members(backing: FileBacking) -> Iterator[tuple[str, int, Region]]:
    if backing.read(0, min(8, backing.size)) != _MAGIC:
        return
    position = len(_MAGIC)
    for _ in range(_MAX_MEMBERS):
        if position + _HEADER > backing.size:
            return
        header = backing.read(position, _HEADER).decode("ascii")
        size = int(header[48:58])
        if size < 0:
            return
        yield (
            header[:16].strip().rstrip("/"),
            int(header[16:28]),
            Region(backing, position + _HEADER, size),
        )
        position += _HEADER + size + size % 2


def _control(region: Region, name: str) -> str:
    data = region.read(limit=_MAX_CONTROL, what=name)
    if name.endswith(".xz"):
        data = lzma.LZMADecompressor(memlimit=1 << 28).decompress(data, _MAX_CONTROL)
    elif name.endswith(".gz"):
        data = zlib.decompressobj(wbits=31).decompress(data, _MAX_CONTROL)
    elif name.endswith(".zst"):
        import zstandard

        try:
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_CONTROL)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
    elif name != "control.tar":
        raise ValueError(f"unknown compression of {name}")
    for entry in read_tar(Region(BytesBacking(data), 0, len(data))):
        if entry.name in (b"./control", b"control"):
            return entry.content.read(0, entry.content.size).decode().strip("\n")
    raise ValueError("it has no control file")


def _fields(control: str) -> Mapping[str, str]:
    return {match[1]: match[2] for match in re.finditer(r"(?m)^([\w-]+): *(.*)$", control)}
