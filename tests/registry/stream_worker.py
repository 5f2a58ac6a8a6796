"""Pushes and pulls generated blobs in a process of its own, and prints its peak memory as JSON.

python stream_worker.py HOST BLOBS BYTES-PER-BLOB
"""

import contextlib
import hashlib
import io
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.events import silent
from smolbuild.model.oci import Descriptor
from smolbuild.registry.client import RegistryClient
from smolbuild.registry.transfer import pull_blobs, push_blobs


class Generated(io.RawIOBase):
    """A stream of ``size`` bytes that are never in memory together."""

    def __init__(self, number: int, size: int) -> None:
        self.block = hashlib.sha512(str(number).encode()).digest() * 1024
        self.left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self.block), self.left)
        buffer[:count] = self.block[:count]
        self.left -= count
        return count


def main() -> None:
    host, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def opener(number: int) -> Callable[[], io.BufferedReader]:
        return lambda: io.BufferedReader(Generated(number, size), 256 * 1024)

    blobs = []
    for number in range(count):
        hasher = hashlib.sha256()
        with opener(number)() as stream:
            while piece := stream.read(1 << 20):
                hasher.update(piece)
        digest = Digest("sha256:" + hasher.hexdigest())
        blobs.append(Descriptor(media_type="x", digest=digest, size=size))

    received, lock = 0, threading.Lock()

    @contextlib.contextmanager
    def sink(_: Descriptor) -> Iterator[Callable[[bytes], None]]:
        def receive(piece: bytes) -> None:
            nonlocal received
            with lock:
                received += len(piece)

        yield receive

    with RegistryClient(host) as client:
        openers = [(blob, opener(number)) for number, blob in enumerate(blobs)]
        sent = push_blobs(client, "t/stream", openers, emit=silent)
        pulled = pull_blobs(client, "t/stream", blobs, sink, emit=silent, threads=1)
        pull_blobs(client, "t/stream", blobs, sink, emit=silent)
    # Not getrusage: its maximum begins with the size of the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    print(json.dumps({"sent": sent, "pulled": pulled, "received": received, "peak": peak}))


if __name__ == "__main__":
    main()
