"""An artifact up and down, through a registry to which strangers attach what they like."""

import pytest
from testing_registry import FakeClock, FakeRegistry

from smolbuild.attempt.verify import verify_local
from smolbuild.build.publish import publish
from smolbuild.build.pull import pull_artifact
from smolbuild.build.sign import add_signature, sign_artifact
from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.core.events import silent
from smolbuild.model.oci import (
    EMPTY,
    EMPTY_TYPE,
    MANIFEST_TYPE,
    describe,
    encode_json,
    fallback_tag,
)
from smolbuild.model.reference import parse_reference
from smolbuild.registry.client import RegistryClient
from smolbuild.store.layout import Store
from smolbuild.trust.keys import generate_key, load_private_key

REPOSITORY = "team/x"


@pytest.fixture
def registry():
    with FakeRegistry() as running:
        yield running


@pytest.fixture
def client(registry):
    with RegistryClient(registry.host, clock=FakeClock()) as made:
        yield made


@pytest.fixture
def reference(registry):
    return parse_reference(f"{registry.host}/{REPOSITORY}:v1")


@pytest.fixture
def signer(tmp_path):
    generate_key(tmp_path / "key.pem")
    return load_private_key(tmp_path / "key.pem")


@pytest.fixture
def keys(signer):
    return {signer.public.hint: signer.public}


@pytest.fixture
def pushed(packed, client, reference, signer):
    """Give an artifact that is signed and in the registry."""
    artifact = packed.pack()
    packed.store.name(artifact.index.descriptor, "x:latest")
    sign_artifact(packed.store, artifact, signer, (), now=0)
    publish(packed.store, artifact, reference, client, emit=silent)
    return artifact


@pytest.fixture
def worker(tmp_path):
    return Store(tmp_path / "worker")


def attach(registry, client, subject, *layers: bytes) -> bytes:
    """Attach a manifest of some other kind to ``subject``, as anybody may."""
    for data in (EMPTY, *layers):
        registry.add_blob(REPOSITORY, data)
    manifest = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": "text/x-note",
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [describe(data, "text/plain").to_json() for data in layers],
            "subject": subject.to_json(),
        }
    )
    client.attach(REPOSITORY, manifest)
    return manifest


def test_what_was_pushed_is_pulled_and_verifies_without_the_registry(
    pushed, worker, client, reference, keys
):
    pulled = pull_artifact(worker, reference, client, keys, emit=silent)
    assert pulled.artifact == pushed
    assert pulled.bytes_pulled > 0
    assert verify_local(worker, str(reference), keys).digest == pushed.index.descriptor.digest
    assert pull_artifact(worker, reference, client, keys, emit=silent).bytes_pulled == 0


def test_nothing_is_named_or_fetched_for_a_stranger_s_key(
    pushed, worker, client, reference, tmp_path
):
    stranger = generate_key(tmp_path / "stranger.pem")
    with pytest.raises(VerificationError) as caught:
        pull_artifact(worker, reference, client, {stranger.hint: stranger}, emit=silent)
    assert caught.value.code == "wrong-key"
    assert worker.names() == {}
    assert list(worker.blobs()) == []


def test_another_key_signs_too_and_only_once(pushed, packed, signer, keys, tmp_path):
    generate_key(tmp_path / "second.pem")
    second = load_private_key(tmp_path / "second.pem")
    assert not add_signature(packed.store, pushed, signer, now=0)
    assert add_signature(packed.store, pushed, second, now=0)
    assert not add_signature(packed.store, pushed, second, now=0)
    digest = pushed.index.descriptor.digest
    for trusted in (keys, {second.public.hint: second.public}):
        assert verify_local(packed.store, str(digest), trusted).digest == digest


def test_an_unsigned_artifact_is_not_pushed(packed, client, reference, registry):
    artifact = packed.pack()
    with pytest.raises(UsageError) as caught:
        publish(packed.store, artifact, reference, client, emit=silent)
    assert caught.value.code == "unsigned"
    assert registry.manifests == {}


def test_small_notes_are_kept_with_the_artifact(pushed, worker, client, registry, reference, keys):
    attach(registry, client, pushed.index.descriptor, b"a note")
    pull_artifact(worker, reference, client, keys, emit=silent)
    kinds = {entry.artifact_type for entry in worker.referrers(pushed.index.descriptor.digest)}
    assert "text/x-note" in kinds


def test_what_strangers_attach_is_no_reason_to_fail_and_is_not_collected_when_large(
    pushed, worker, client, registry, reference, keys
):
    subject = pushed.index.descriptor
    large = [b"%d" % number * 3_000_000 for number in range(4)]  # each is small, all are not
    attach(registry, client, subject, *large)
    gone = attach(registry, client, subject, b"this blob goes")
    registry.blobs.pop((REPOSITORY, describe(b"this blob goes", "").digest))
    pull_artifact(worker, reference, client, keys, emit=silent)
    kept = {entry.digest for entry in worker.referrers(subject.digest)}
    assert describe(gone, "").digest not in kept
    assert not any(worker.has(describe(data, "").digest) for data in large)
    assert worker.find(fallback_tag(subject.digest)) is not None
