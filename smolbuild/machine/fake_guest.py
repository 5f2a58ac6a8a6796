"""What a fake guest remembers, and how it lies on disks: at their start, in one run of clusters."""

import base64
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

from smolbuild.core.errors import MachineError
from smolbuild.machine.base import Disk
from smolbuild.store.qcow2 import CLUSTER, clusters, write_overlay

__all__ = ["MAGIC", "FakeGuest", "read_guest", "write_guest"]

MAGIC = b"smolbuild fake machine 1\n"


@dataclass(slots=True)
class FakeGuest:
    """What a guest remembers, in memory and on disk."""

    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Mode and content by absolute path."""
    results: dict[str, tuple[int, bool, bytes]] = field(default_factory=dict)
    """Status, whether it is an ended execution, and output, by exec id."""
    hostname: str = "smolbuild"
    machine_id: str = ""
    boot_id: str = ""

    def encode(self) -> bytes:
        """Return the guest as bytes; ``decode`` of them gives an equal one."""
        value = {
            "files": {
                path: [mode, base64.b64encode(data).decode()]
                for path, (mode, data) in self.files.items()
            },
            "results": {
                name: [status, ended, base64.b64encode(output).decode()]
                for name, (status, ended, output) in self.results.items()
            },
            "names": [self.hostname, self.machine_id, self.boot_id],
        }
        body = json.dumps(value).encode()
        return MAGIC + struct.pack("<Q", len(body)) + body

    @classmethod
    def decode(cls, data: bytes) -> "FakeGuest | None":
        """Return the guest that ``data`` begins with, or None."""
        if not data.startswith(MAGIC):
            return None
        (length,) = struct.unpack_from("<Q", data, len(MAGIC))
        start = len(MAGIC) + 8
        value = json.loads(data[start : start + length])
        names = value["names"]
        return cls(
            files={p: (mode, base64.b64decode(d)) for p, (mode, d) in value["files"].items()},
            results={n: (s, e, base64.b64decode(o)) for n, (s, e, o) in value["results"].items()},
            hostname=names[0],
            machine_id=names[1],
            boot_id=names[2],
        )


def read_guest(disk: Disk) -> FakeGuest:
    """Return the guest of the uppermost layer of ``disk`` that has one; a new one if none has."""
    for overlay in reversed(disk.overlays):
        for extent in clusters(overlay):
            if extent.guest_offset == 0 and extent.kind == "data":
                data = overlay.read_bytes()[extent.host_offset :][: extent.length]
                if (guest := FakeGuest.decode(data)) is not None:
                    return guest
    with disk.base.open("rb") as base:
        start = base.read(len(MAGIC) + 8)
        if start.startswith(MAGIC):
            start += base.read(struct.unpack("<Q", start[-8:])[0])
    return FakeGuest.decode(start) or FakeGuest()


def write_guest(path: Path, size: int, guest: FakeGuest) -> None:
    """Write ``guest`` into the new overlay ``path`` of a disk of ``size`` bytes.

    Raises:
        MachineError: it does not fit.

    """
    content = guest.encode()
    if len(content) > size:
        raise MachineError(f"the fake guest's files take {len(content):,} bytes, too many")
    count = -(-len(content) // CLUSTER)
    with write_overlay(path, size, data=range(count), zeros=()) as write:
        for number in range(count):
            write(number, memoryview(content)[number * CLUSTER :][:CLUSTER])
