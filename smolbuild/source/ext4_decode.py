"""Records of an ext4 image read back: inodes, directory entries, extended attributes.

The counterpart of ``ext4_records``; nothing here trusts a length or offset. Formats: the kernel's
``Documentation/filesystems/ext4`` ("Dynamic Structures").
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from smolbuild.core.errors import VerificationError
from smolbuild.source.ext4_volume import damaged

__all__ = [
    "INLINE_DATA",
    "RawInode",
    "block_attributes",
    "decode_device",
    "decode_inode",
    "directory_entries",
    "has_map",
    "inode_attributes",
]

INLINE_DATA = 0x10000000
"""The content stands in the inode: in its map and in the attribute ``system.data``."""

_EXTENTS_FLAG = 0x80000
_XATTR_MAGIC = 0xEA020000
_PREFIXES = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    6: b"security.",
    7: b"system.",
    8: b"system.richacl",
}
_ACLS = (2, 3)
_NO_OWNER = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RawInode:
    """An inode's fields; ``data`` are all its bytes."""

    number: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    links: int
    flags: int
    map: bytes
    attribute_block: int
    data: bytes


_HEAD = struct.Struct("<HHI8xi4xHHII4x60s4xII4xHHHH")


def decode_inode(data: bytes, number: int, *, large_directories: bool) -> RawInode:
    """Return the fields of an inode's bytes; a size is not yet checked against anything."""
    (
        mode, uid, size, mtime, gid, links, _, flags, block_map,
        acl, size_high, _, acl_high, uid_high, gid_high,
    ) = _HEAD.unpack_from(data)  # fmt: skip
    kind = mode & 0xF000
    if kind == 0x8000 or (kind == 0x4000 and large_directories):
        size |= size_high << 32
    if len(data) > 140 and struct.unpack_from("<H", data, 128)[0] >= 12:
        mtime += (struct.unpack_from("<I", data, 136)[0] & 3) << 32
    return RawInode(
        number, mode, uid | uid_high << 16, gid | gid_high << 16, size, mtime, links, flags,
        block_map, acl | acl_high << 32, data,
    )  # fmt: skip


def has_map(inode: RawInode) -> bool:
    """Return whether the inode's map names blocks, rather than holding content or a device."""
    kind = inode.mode & 0xF000
    if inode.flags & INLINE_DATA:
        return False
    if kind == 0xA000:
        return inode.size >= 60 or bool(inode.flags & _EXTENTS_FLAG)
    return kind in (0x4000, 0x8000)


def decode_device(block_map: bytes) -> tuple[int, int]:
    """Return the major and minor number of a device's inode."""
    old, new = struct.unpack_from("<II", block_map)
    if old:
        return old >> 8 & 0xFF, old & 0xFF
    return new >> 8 & 0xFFF, new & 0xFF | new >> 12 & 0xFFF00


def directory_entries(data: bytes, number: int) -> Iterator[tuple[bytes, int]]:
    """Yield the (name, inode) pairs of one directory block, without ``.`` and ``..``.

    The inner nodes of a hashed directory look like blocks without entries, so they need no care.

    Raises:
        VerificationError: an entry is malformed; names the directory's inode.

    """
    at, size = 0, len(data)
    while at < size:
        if at + 8 > size:
            raise damaged(f"directory {number:,} has an entry that is cut short")
        inode, length, name_length = struct.unpack_from("<IHB", data, at)
        if size >= 1 << 16:  # only then a length can need more than 16 bits
            length = size if length in (0, 0xFFFF) else length & 0xFFFC | (length & 3) << 16
        if length < 8 + name_length or length < 8 or length % 4 or at + length > size:
            raise damaged(f"directory {number:,} has an entry of impossible length")
        if inode:
            name = data[at + 8 : at + 8 + name_length]
            if name not in (b".", b".."):
                if not name or b"/" in name or b"\0" in name:
                    raise damaged(f"directory {number:,} has an impossible name")
                yield name, inode
        at += length


def inode_attributes(inode: RawInode) -> dict[bytes, bytes]:
    """Return the attributes that stand in the inode; raises VerificationError when malformed."""
    if len(inode.data) < 132:
        return {}
    start = 128 + struct.unpack_from("<H", inode.data, 128)[0]
    if start + 4 > len(inode.data) or start % 4:
        return {}
    if struct.unpack_from("<I", inode.data, start)[0] != _XATTR_MAGIC:
        return {}
    area = inode.data[start + 4 :]
    return dict(_attributes(area, 0, f"inode {inode.number:,}"))


def block_attributes(data: bytes, block: int) -> dict[bytes, bytes]:
    """Return the attributes of an attribute block; raises VerificationError when malformed."""
    if struct.unpack_from("<I", data)[0] != _XATTR_MAGIC:
        raise damaged(f"block {block:,} holds no extended attributes")
    return dict(_attributes(data, 32, f"block {block:,}"))


def _attributes(area: bytes, at: int, where: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values; values are found at their offset in ``area``."""
    while at + 4 <= len(area) and area[at : at + 4] != bytes(4):
        if at + 16 > len(area):
            raise _bad(where)
        length, index, offset, elsewhere, size = struct.unpack_from("<BBHII", area, at)
        name = area[at + 16 : at + 16 + length]
        if len(name) != length or elsewhere or (size and offset + size > len(area)):
            raise _bad(where)
        prefix = _PREFIXES.get(index)
        if prefix is not None:
            value = area[offset : offset + size] if size else b""
            yield prefix + name, _acl(value, where) if index in _ACLS else value
        at += 16 + length + 3 & ~3


def _acl(value: bytes, where: str) -> bytes:
    """Turn an ACL as ext4 stores it (version 1) into what system calls have (version 2)."""
    if value[:4] != b"\1\0\0\0":
        raise _bad(where)
    result = [struct.pack("<I", 2)]
    at = 4
    while at < len(value):
        if at + 4 > len(value):
            raise _bad(where)
        tag, permissions = struct.unpack_from("<HH", value, at)
        owner, at = _NO_OWNER, at + 4
        if tag in (0x02, 0x08):  # a named user, a named group
            if at + 4 > len(value):
                raise _bad(where)
            owner, at = struct.unpack_from("<I", value, at)[0], at + 4
        result.append(struct.pack("<HHI", tag, permissions, owner))
    return b"".join(result)


def _bad(where: str) -> VerificationError:
    return damaged(f"the extended attributes in {where} are malformed")
