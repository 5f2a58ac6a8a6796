"""Sets of blobs to and from a registry, a few at once, one session each.

The first error stops the others at once: what they were sending or receiving is broken off, and no
new one begins. Memory is one piece (256 KiB) per thread, whatever the blobs' size.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import IO

from smolbuild.core.digest import Digest
from smolbuild.core.events import Emit, Transfer
from smolbuild.model.oci import Descriptor
from smolbuild.registry.client import RegistryClient
from smolbuild.registry.retry import Stop
from smolbuild.registry.tokens import push_scope
from smolbuild.registry.upload import has_blob

__all__ = ["pull_blobs", "push_blobs"]

_EVENT_BYTES = 1024 * 1024


def push_blobs(
    client: RegistryClient,
    repository: str,
    blobs: Sequence[tuple[Descriptor, Callable[[], IO[bytes]]]],
    *,
    emit: Emit,
    threads: int | None = None,
) -> int:
    """Upload ``blobs`` and return the bytes sent; those the repository has are skipped. Idempotent.

    Raises:
        RegistryError, VerificationError: of the first blob that failed.

    """
    distinct = {descriptor.digest: (descriptor, opener) for descriptor, opener in blobs}
    meter = _Meter("push", [descriptor for descriptor, _ in distinct.values()], emit)
    stop = Stop()

    def push(descriptor: Descriptor, opener: Callable[[], IO[bytes]]) -> int:
        stop.check()
        with client.session(stop) as session:
            scope = push_scope(repository)
            if has_blob(session, repository, descriptor, scope=scope, stop=stop):
                meter.at(descriptor.digest, descriptor.size)
                return 0
        client.push_blob(repository, descriptor, opener, meter.of(descriptor), stop=stop)
        return descriptor.size

    jobs = [functools.partial(push, descriptor, opener) for descriptor, opener in distinct.values()]
    return _side_by_side(jobs, threads or client.threads, stop)


def pull_blobs(
    client: RegistryClient,
    repository: str,
    wanted: Sequence[Descriptor],
    sink_for: Callable[[Descriptor], AbstractContextManager[Callable[[bytes], object]]],
    *,
    emit: Emit,
    threads: int | None = None,
) -> int:
    """Download ``wanted``, each into its own sink, and return the bytes received.

    ``sink_for`` is called in the thread that does the transfer. Its block ends without an error
    only when all bytes have come and are verified; that is when it may keep them.

    Raises:
        RegistryError, VerificationError: of the first blob that failed.

    """
    distinct = {descriptor.digest: descriptor for descriptor in wanted}
    meter = _Meter("pull", list(distinct.values()), emit)
    stop = Stop()

    def pull(descriptor: Descriptor) -> int:
        stop.check()
        with sink_for(descriptor) as sink:
            client.pull_blob(repository, descriptor, sink, meter.of(descriptor), stop=stop)
        return descriptor.size

    jobs = [functools.partial(pull, descriptor) for descriptor in distinct.values()]
    return _side_by_side(jobs, threads or client.threads, stop)


class _Meter:
    """Adds up the progress of concurrent blobs; emits one event per MiB, and the last one."""

    def __init__(self, what: str, blobs: Sequence[Descriptor], emit: Emit) -> None:
        self._what = what
        self._emit = emit
        self._lock = threading.Lock()
        self._done: dict[Digest, int] = {}
        self._sum = 0
        self._said = 0
        self._total = sum(blob.size for blob in blobs)

    def of(self, blob: Descriptor) -> Callable[[int], None]:
        """Return the progress function for one blob."""
        return lambda done: self.at(blob.digest, done)

    def at(self, digest: Digest, done: int) -> None:
        """Note that ``done`` bytes of a blob are through."""
        with self._lock:
            self._sum += done - self._done.get(digest, 0)
            self._done[digest] = done
            if self._sum != self._total and abs(self._sum - self._said) < _EVENT_BYTES:
                return
            self._said = self._sum
            event = Transfer(what=self._what, done=self._sum, total=self._total)
        self._emit(event)


def _side_by_side(jobs: Sequence[Callable[[], int]], threads: int, stop: Stop) -> int:
    if not jobs:
        return 0
    moved = 0
    workers = max(1, min(threads, len(jobs)))
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="transfer") as pool:
        futures = [pool.submit(job) for job in jobs]
        complete = False
        try:
            for future in as_completed(futures):
                moved += future.result()
            complete = True
        finally:
            if not complete:  # an error, or Ctrl-C in this thread
                stop.set()
                for future in futures:
                    future.cancel()
    return moved
