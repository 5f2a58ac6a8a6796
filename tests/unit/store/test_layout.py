import json
import threading

import pytest

from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.model.oci import (
    EMPTY,
    EMPTY_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    describe,
    encode_json,
    fallback_tag,
)
from smolbuild.store.collect import collect
from smolbuild.store.layout import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def put_artifact(store: Store, text: bytes) -> Descriptor:
    store.add_bytes(EMPTY)
    store.add_bytes(text)
    manifest = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [describe(text, "text/plain").to_json()],
        }
    )
    store.add_bytes(manifest)
    index = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [describe(manifest, MANIFEST_TYPE).to_json()],
        }
    )
    store.add_bytes(index)
    return describe(index, INDEX_TYPE)


def put_referrer(store: Store, subject: Descriptor, text: bytes) -> Descriptor:
    store.add_bytes(EMPTY)
    store.add_bytes(text)
    return store.attach(
        encode_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": "text/x-note",
                "config": describe(EMPTY, EMPTY_TYPE).to_json(),
                "layers": [describe(text, "text/x-note").to_json()],
                "subject": describe(store.read(subject.digest), subject.media_type).to_json(),
            }
        )
    )


def test_it_is_an_oci_layout(store):
    store.name(put_artifact(store, b"one"), "one:v1")
    assert json.loads((store.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((store.root / "index.json").read_text())
    (entry,) = index["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "one:v1"}
    assert store.path(entry["digest"]).exists()


@pytest.mark.parametrize(
    ("sent", "code"), [(b"hell", "length"), (b"hello!", "length"), (b"hullo", "digest")]
)
def test_a_wrong_blob_never_becomes_visible(store, sent, code):
    expected = describe(b"hello", "text/plain")
    with pytest.raises(VerificationError) as caught, store.ingest(expected) as receive:
        receive(sent)
    assert caught.value.code == code
    assert not store.has(expected.digest)
    assert list(store.blobs()) == []


def test_ingest_takes_a_blob_in_parts(store):
    expected = describe(b"hello", "text/plain")
    with store.ingest(expected) as receive:
        receive(b"he")
        receive(b"llo")
    assert store.read(expected.digest) == b"hello"


def test_a_damaged_blob_is_noticed_when_read(store):
    digest = store.add_bytes(b"hello")
    store.path(digest).write_bytes(b"hellO")
    with pytest.raises(VerificationError, match="damaged"):
        store.read(digest)


def test_a_missing_or_oversized_blob_is_an_error(store):
    with pytest.raises(VerificationError, match="lacks"):
        store.read(digest_bytes(b"nowhere"))
    digest = store.add_bytes(b"x" * 100)
    with pytest.raises(VerificationError, match="more than"):
        store.read(digest, limit=10)


def test_resolve_knows_names_latest_digests_and_prefixes(store):
    one, two = put_artifact(store, b"one"), put_artifact(store, b"two")
    store.name(one, "one:v1", "key-abc")
    store.name(two, "two:latest")
    assert store.resolve("one:v1").digest == one.digest
    assert store.resolve("two").digest == two.digest
    for text in (one.digest, one.digest[7:], one.digest[7:19], f"host/x@{one.digest}"):
        assert store.resolve(text).digest == one.digest
    with pytest.raises(UsageError) as caught:
        store.resolve("three")
    assert "one:v1, two:latest" in caught.value.hint
    assert "key-" not in caught.value.hint


def test_names_move_and_go(store):
    one, two = put_artifact(store, b"one"), put_artifact(store, b"two")
    store.name(one, "x")
    store.name(two, "x")
    assert store.resolve("x").digest == two.digest
    store.unname("x", "never-there")
    assert store.find("x") is None


def test_many_threads_name_at_once_and_nothing_is_lost(store):
    one = put_artifact(store, b"one")
    threads = [threading.Thread(target=store.name, args=(one, f"n{i}")) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(store.names()) == {f"n{i}" for i in range(16)}


def test_referrers_are_listed_once_under_their_subject(store):
    one = put_artifact(store, b"one")
    first = put_referrer(store, one, b"note")
    assert put_referrer(store, one, b"note") == first
    second = put_referrer(store, one, b"other")
    assert [r.digest for r in store.referrers(one.digest)] == [first.digest, second.digest]
    assert store.referrers(one.digest)[0].artifact_type == "text/x-note"
    assert store.find(fallback_tag(one.digest)) is not None


def test_collect_keeps_what_names_reach_and_referrers_of_it(store):
    kept, gone = put_artifact(store, b"kept"), put_artifact(store, b"gone")
    store.name(kept, "kept")
    store.name(gone, "gone")
    note = put_referrer(store, kept, b"note")
    on_note = put_referrer(store, note, b"note on note")
    lost = put_referrer(store, gone, b"lost note")
    store.unname("gone")
    before = len(list(store.blobs()))
    freed = collect(store)
    assert freed > 0
    assert len(list(store.blobs())) < before
    assert store.has(kept.digest)
    assert store.read(digest_bytes(b"kept")) == b"kept"
    assert store.has(note.digest)
    assert store.has(on_note.digest)
    assert not store.has(lost.digest)
    assert not store.has(gone.digest)
    assert store.find(fallback_tag(gone.digest)) is None
    assert collect(store) == 0


def test_collect_removes_what_a_killed_process_was_writing(store):
    store.name(put_artifact(store, b"kept"), "kept")
    half = store.path(digest_bytes(b"x")).with_name(".tmp-half")
    half.write_bytes(b"half")
    collect(store)
    assert not half.exists()
    assert store.has(digest_bytes(b"kept"))


def test_collect_waits_for_a_lease(store):
    from smolbuild.core.errors import BusyError

    with store.lease(), pytest.raises(BusyError), store.exclusive(timeout=0.05):
        pass


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"manifests": 3}'])
def test_a_damaged_index_says_what_to_do(store, content):
    put_artifact(store, b"x")
    (store.root / "index.json").write_bytes(content)
    with pytest.raises(VerificationError, match=r"index\.json") as caught:
        store.names()
    assert str(store.root) in caught.value.hint
