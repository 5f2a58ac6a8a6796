"""Sets of blobs: side by side, skipped when there, all stopped by the first error."""

import contextlib
import io
import random
import threading
import time

import pytest
import testing_registry as faults

from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.core.events import Transfer, silent
from smolbuild.model.oci import describe
from smolbuild.registry.images import RegistryImages
from smolbuild.registry.retry import Timeouts
from smolbuild.registry.transfer import pull_blobs, push_blobs

_random = random.Random(3)
BLOBS = {describe(d, "x").digest: d for d in (_random.randbytes(400_000 + n) for n in range(12))}
WANTED = [describe(data, "x") for data in BLOBS.values()]


def openers(descriptors=WANTED):
    return [(d, lambda d=d: io.BytesIO(BLOBS[d.digest])) for d in descriptors]


class Sinks:
    def __init__(self):
        self.kept = {}
        self.open = 0

    @contextlib.contextmanager
    def __call__(self, descriptor):
        data = bytearray()
        self.open += 1
        try:
            yield data.extend
            self.kept[descriptor.digest] = bytes(data)
        finally:
            self.open -= 1


def test_there_and_back(fake, client):
    events = []
    total = sum(map(len, BLOBS.values()))
    assert push_blobs(client, "a/b", openers() + openers()[:3], emit=events.append) == total
    assert events[-1] == Transfer(what="push", done=total, total=total)
    sinks = Sinks()
    assert pull_blobs(client, "a/b", WANTED + WANTED[:3], sinks, emit=events.append) == total
    assert sinks.kept == BLOBS
    assert events[-1] == Transfer(what="pull", done=total, total=total)
    assert len(events) < 20


def test_what_is_there_is_not_sent(fake, client):
    for data in list(BLOBS.values())[:5]:
        fake.add_blob("a/b", data)
    sent = push_blobs(client, "a/b", openers(), emit=silent)
    assert sent == sum(map(len, list(BLOBS.values())[5:]))
    assert fake.count("PUT", "uploads") == 7
    assert push_blobs(client, "a/b", openers(), emit=silent) == 0


def test_nothing_to_do(fake, client):
    assert push_blobs(client, "a/b", [], emit=silent) == 0
    assert pull_blobs(client, "a/b", [], Sinks(), emit=silent) == 0
    assert not fake.seen


def test_threads_are_bounded(fake, client):
    live, most, lock = 0, 0, threading.Lock()

    @contextlib.contextmanager
    def sink(descriptor):
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
        yield lambda piece: None
        with lock:
            live -= 1

    push_blobs(client, "a/b", openers(), emit=silent, threads=3)
    pull_blobs(client, "a/b", WANTED, sink, emit=silent, threads=2)
    assert most <= 2


def test_first_error_stops_the_others_at_once(fake, make_client):
    """The others hang in a registry that says nothing; their deadline is a minute away."""
    client = make_client(fake, timeouts=Timeouts(connect=2, read=60))
    bad = WANTED[5]
    for descriptor in WANTED:
        fake.add_blob("a/b", BLOBS[descriptor.digest])
    fake.blobs["a/b", bad.digest] = bytes(bad.size)
    fake.fail("GET", f"blobs/(?!{bad.digest})", faults.never_answer, times=99)
    sinks = Sinks()
    began = time.monotonic()
    with pytest.raises(VerificationError):
        pull_blobs(client, "a/b", [*WANTED[:3], bad, *WANTED[6:]], sinks, emit=silent, threads=4)
    assert time.monotonic() - began < 10
    assert not sinks.kept
    assert not sinks.open
    assert fake.count("GET", "blobs") <= 5  # those that waited for a thread never began


def test_first_error_stops_uploads(fake, make_client):
    client = make_client(fake, timeouts=Timeouts(connect=2, read=60))
    fake.fail("PUT", "uploads", faults.status(403))
    fake.fail("PUT", "uploads", faults.never_answer, times=99)
    began = time.monotonic()
    with pytest.raises(RegistryError) as caught:
        push_blobs(client, "a/b", openers(), emit=silent, threads=4)
    assert caught.value.code == "denied"
    assert time.monotonic() - began < 10


def test_interrupt_in_the_waiting_thread_stops_the_transfer(fake, client):
    for descriptor in WANTED:
        fake.add_blob("a/b", BLOBS[descriptor.digest])

    class InterruptError(BaseException):
        pass

    def sink(descriptor):
        raise InterruptError

    with pytest.raises(InterruptError):
        pull_blobs(client, "a/b", WANTED, sink, emit=silent, threads=2)
    assert threading.active_count() < 20


def test_images_for_the_source_layer(fake, tmp_path):
    manifest = b'{"schemaVersion":2}'
    kind = "application/vnd.oci.image.manifest.v1+json"
    data = next(iter(BLOBS.values()))
    fake.add_blob("a/b", data)
    fake.manifests["a/b", "v1"] = (kind, manifest)
    descriptor = describe(manifest, kind)
    fake.manifests["a/b", descriptor.digest] = (kind, manifest)
    reference, events = f"{fake.host}/a/b:v1", []
    with contextlib.closing(RegistryImages({}, emit=events.append)) as images:
        assert images.resolve(reference) == descriptor
        assert images.manifest(reference, descriptor.digest) == manifest
        with (tmp_path / "blob").open("wb") as stream:
            images.blob(reference, WANTED[0], stream)
        with pytest.raises(RegistryError) as caught:
            images.resolve(f"{fake.host}/a/b:v2")
    assert (tmp_path / "blob").read_bytes() == data
    assert caught.value.code == "not-found"
    assert events[-1].done == events[-1].total == len(data)
