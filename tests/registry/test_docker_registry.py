"""The transport against Debian's docker-registry, over a line that breaks."""

import contextlib
import io
import random
import socket
import threading

import pytest

from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.core.events import silent
from smolbuild.model.oci import (
    BUNDLE_TYPE,
    EMPTY,
    EMPTY_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    describe,
    encode_json,
)
from smolbuild.registry.transfer import pull_blobs, push_blobs
from smolbuild.trust.referrer import referrer_manifest

DATA = random.Random(4).randbytes(6_000_000)
BLOB = describe(DATA, "application/octet-stream")


class BreakingLine:
    """A TCP forwarder that breaks its first connections after so many bytes in one direction."""

    def __init__(self, target, *, up=(), down=()):
        self.target = target
        self.up, self.down = list(up), list(down)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets = []
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self):
        name, _, port = self.target.partition(":")
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection((name, int(port)), 5)
                self.sockets += [client, server]
                for source, sink, limits in (
                    (client, server, self.up),
                    (server, client, self.down),
                ):
                    threading.Thread(
                        target=self.pump, args=(source, sink, limits), daemon=True
                    ).start()

    def pump(self, source, sink, limits):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if limits and passed + len(data) >= limits[0]:
                    sink.sendall(data[: limits[0] - passed])
                    limits.pop(0)
                    break
                sink.sendall(data)
                passed += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)
        for end in self.sockets:
            end.close()


def test_blobs_manifests_and_tags(real_registry, make_client):
    client = make_client(real_registry)
    sent = push_blobs(client, "t/round", [(BLOB, lambda: io.BytesIO(DATA))], emit=silent)
    assert sent == len(DATA)
    client.push_blob("t/round", describe(EMPTY, EMPTY_TYPE), lambda: io.BytesIO(EMPTY))
    client.push_blob("t/round", describe(b"", "x"), lambda: io.BytesIO(b""))
    data = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [BLOB.to_json()],
        }
    )
    manifest = client.put_manifest("t/round", describe(data, "x").digest, data, MANIFEST_TYPE)
    index = encode_json(
        {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [manifest.to_json()]}
    )
    top = client.put_manifest("t/round", "v1", index, INDEX_TYPE)
    assert client.get_manifest("t/round", "v1") == (index, top)
    assert client.get_manifest("t/round", manifest.digest) == (data, manifest)
    assert client.tags("t/round") == ("v1",)
    assert client.mount_blob("t/mounted", BLOB, "t/round")
    assert client.has_blob("t/mounted", BLOB)
    got = bytearray()
    client.pull_blob("t/mounted", BLOB, got.extend)
    assert got == DATA


def test_referrers_without_the_api(real_registry, make_client):
    client = make_client(real_registry)
    data = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [],
        }
    )
    for blob in (EMPTY, b"bundle one", b"bundle two"):
        client.push_blob("t/ref", describe(blob, "x"), lambda blob=blob: io.BytesIO(blob))
    subject = client.put_manifest("t/ref", "v1", data, MANIFEST_TYPE)
    assert client.referrers("t/ref", subject.digest) == ()
    entries = [
        client.attach(
            "t/ref",
            referrer_manifest(bundle, subject=subject, predicate_type="https://x", created=0),
        )
        for bundle in (b"bundle one", b"bundle two", b"bundle one")
    ]
    assert client.referrers("t/ref", subject.digest, BUNDLE_TYPE) == tuple(entries[:2])


def test_push_over_a_line_that_breaks(real_registry, make_client):
    with BreakingLine(real_registry, up=[2_000_000, 3_000_000]) as line:
        make_client(line.host).push_blob("t/broken", BLOB, lambda: io.BytesIO(DATA))
    got = bytearray()
    make_client(real_registry).pull_blob("t/broken", BLOB, got.extend)
    assert got == DATA


def test_pull_over_a_line_that_breaks(real_registry, make_client):
    make_client(real_registry).push_blob("t/pull", BLOB, lambda: io.BytesIO(DATA))
    got = bytearray()
    with BreakingLine(real_registry, down=[2_000_000, 3_000_000]) as line:
        make_client(line.host).pull_blob("t/pull", BLOB, got.extend)
    assert got == DATA


def test_sets_over_a_line_that_breaks(real_registry, make_client):
    parts = [DATA[n : n + 700_000 + n] for n in range(0, 5_000_000, 700_000)]
    blobs = [describe(part, "x") for part in parts]
    by_digest = dict(zip((b.digest for b in blobs), parts, strict=True))
    kept = {}

    @contextlib.contextmanager
    def sink(blob):
        data = bytearray()
        yield data.extend
        kept[blob.digest] = bytes(data)

    with BreakingLine(real_registry, up=[900_000], down=[900_000]) as line:
        client = make_client(line.host)
        openers = [(b, lambda b=b: io.BytesIO(by_digest[b.digest])) for b in blobs]
        push_blobs(client, "t/set", openers, emit=silent)
        pull_blobs(client, "t/set", blobs, sink, emit=silent)
    assert kept == by_digest


def test_what_the_registry_refuses(real_registry, make_client):
    client = make_client(real_registry)
    with pytest.raises(VerificationError):
        client.push_blob("t/bad", BLOB, lambda: io.BytesIO(DATA[:-1] + b"?"))
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("t/none", "v1")
    assert caught.value.exit_status == 5
    missing = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(b"never pushed", EMPTY_TYPE).to_json(),
            "layers": [],
        }
    )
    with pytest.raises(RegistryError) as caught:
        client.put_manifest("t/none", "v1", missing, MANIFEST_TYPE)
    assert caught.value.code == "rejected"
