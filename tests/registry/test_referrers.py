"""What is attached to a manifest: with the API, without it, and when the registry lies about it."""

import io
import json

import pytest
import testing_registry as faults

from smolbuild.core.digest import hex_of
from smolbuild.core.errors import RegistryError, UsageError, VerificationError
from smolbuild.model.oci import (
    BUNDLE_TYPE,
    EMPTY,
    EMPTY_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    describe,
    encode_json,
    parse_index,
)
from smolbuild.trust.bundle import sign_statement
from smolbuild.trust.keys import generate_key, load_private_key
from smolbuild.trust.referrer import referrer_manifest
from smolbuild.trust.statement import SIGN_TYPE, signature_statement
from smolbuild.trust.verify import MAX_CANDIDATES, verify_signed


def manifest(number=0):
    return encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [],
            "annotations": {"n": str(number)},
        }
    )


SUBJECT = describe(manifest(), MANIFEST_TYPE)
OTHER = describe(manifest(1), MANIFEST_TYPE)
TAG = f"sha256-{hex_of(SUBJECT.digest)}"


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "ci.pem"
    generate_key(path)
    return load_private_key(path)


@pytest.fixture(params=[True, False], ids=["api", "fallback"])
def either(request, fake):
    fake.referrers = request.param
    return fake


class Evidence:
    """What ``attempt`` makes of a client: the source that ``verify_signed`` wants."""

    def __init__(self, client):
        self.client = client

    def referrers(self, subject):
        return self.client.referrers("a/b", subject, BUNDLE_TYPE)

    def manifest(self, descriptor):
        return self.client.get_manifest("a/b", descriptor.digest)[0]

    def blob(self, descriptor):
        data = bytearray()
        self.client.pull_blob("a/b", descriptor, data.extend)
        return bytes(data)


def sign(client, signer, subject=SUBJECT, statement=None):
    client.put_manifest("a/b", "v1", manifest(), MANIFEST_TYPE)
    bundle = sign_statement(statement or signature_statement(subject.digest), signer)
    for data in (bundle, EMPTY):
        client.push_blob("a/b", describe(data, "x"), lambda data=data: io.BytesIO(data))
    data = referrer_manifest(bundle, subject=subject, predicate_type=SIGN_TYPE, created=0)
    return client.attach("a/b", data)


def verify(client, signer):
    keys = {signer.public.hint: signer.public}
    return verify_signed(SUBJECT, Evidence(client), predicate_type=SIGN_TYPE, keys=keys)


def test_attach_and_find(either, client, signer):
    entry = sign(client, signer)
    assert client.referrers("a/b", SUBJECT.digest, BUNDLE_TYPE) == (entry,)
    assert client.referrers("a/b", SUBJECT.digest) == (entry,)
    assert client.referrers("a/b", SUBJECT.digest, "application/x") == ()
    assert client.referrers("a/b", OTHER.digest) == ()
    assert ("a/b", TAG) in either.manifests or either.referrers
    assert verify(client, signer).key == signer.public


def test_attach_twice_changes_nothing(either, client, signer):
    sign(client, signer)
    data = encode_json({**json.loads(manifest()), "subject": SUBJECT.to_json()})
    client.attach("a/b", data)
    before = dict(either.manifests)
    client.attach("a/b", data)
    assert either.manifests == before
    assert len(client.referrers("a/b", SUBJECT.digest)) == 2


def test_registry_that_names_the_subject_without_having_the_api(fake, client, signer):
    fake.referrers, fake.oci_subject = False, True
    sign(client, signer)
    assert verify(client, signer)


def test_registry_with_the_api_that_does_not_say_so(fake, client, signer):
    fake.oci_subject = False
    entry = sign(client, signer)
    assert client.referrers("a/b", SUBJECT.digest) == (entry,)
    assert ("a/b", TAG) in fake.manifests


def test_attach_without_a_subject(client):
    with pytest.raises(UsageError):
        client.attach("a/b", manifest())


@pytest.mark.parametrize("etags", [False, True])
def test_two_writers_of_the_fallback_index(fake, client, signer, etags):
    """Another writer replaces the index between our read and our write."""
    fake.referrers, fake.etags = False, etags
    foreign = describe(manifest(7), MANIFEST_TYPE)

    def interfere(h):
        ours = h.registry.manifests.get(("a/b", TAG))
        listed = list(parse_index(ours[1]).manifests) if ours and etags else []
        index = encode_json(
            {
                "schemaVersion": 2,
                "mediaType": INDEX_TYPE,
                "manifests": [d.to_json() for d in [*listed, foreign]],
            }
        )
        if not etags:  # lands after ours, which is lost
            h.serve()
        h.registry.manifests["a/b", TAG] = (INDEX_TYPE, index)
        if etags:  # lands before ours, which is refused
            h.serve()

    first = sign(client, signer)
    fake.fail("PUT", f"manifests/{TAG}", interfere)
    second = sign(client, signer)
    digests = {entry.digest for entry in client.referrers("a/b", SUBJECT.digest)}
    assert {second.digest, foreign.digest} <= digests
    assert not etags or first.digest in digests


def test_fallback_index_that_never_keeps_the_entry(fake, client, signer):
    fake.referrers = False
    fake.fail("PUT", f"manifests/{TAG}", faults.status(201), times=99)
    with pytest.raises(RegistryError) as caught:
        sign(client, signer)
    assert caught.value.code == "referrers-conflict"


# -- unsigned, badly signed, unavailable: three different things


def test_unsigned(either, client, signer):
    client.put_manifest("a/b", "v1", manifest(), MANIFEST_TYPE)
    with pytest.raises(VerificationError) as caught:
        verify(client, signer)
    assert caught.value.code == "unsigned"


@pytest.mark.parametrize("code", [401, 403, 429, 500, 503])
def test_unavailable_is_not_unsigned(either, client, signer, code):
    sign(client, signer)
    either.fail("GET", "referrers|sha256-", faults.status(code), times=99)
    with pytest.raises(RegistryError):
        verify(client, signer)


@pytest.mark.parametrize("where", ["manifests/sha256:", "blobs/"])
@pytest.mark.parametrize("fault", [faults.status(503), faults.hang_up, faults.cut_down(5)])
def test_unavailable_half_way_is_not_unsigned(either, client, signer, where, fault):
    sign(client, signer)
    either.fail("GET", where, fault, times=99)
    with pytest.raises(RegistryError):
        verify(client, signer)


def test_signed_by_somebody_else(either, client, signer, tmp_path):
    sign(client, signer)
    generate_key(tmp_path / "k")
    other = load_private_key(tmp_path / "k")
    with pytest.raises(VerificationError) as caught:
        verify(client, other)
    assert caught.value.code == "wrong-key"


def test_tampered_bundle_blob(either, client, signer):
    sign(client, signer)
    for key, data in either.blobs.items():
        if b"dsseEnvelope" in data:
            either.blobs[key] = data.replace(b"A", b"B", 1)
    with pytest.raises(VerificationError):
        verify(client, signer)


def lie(fake, *entries):
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(entries)}
    act = faults.body(encode_json(index), Content_Type=INDEX_TYPE)
    fake.fail("GET", "referrers", act, times=99)


def test_list_that_names_what_is_not_there(fake, client, signer):
    sign(client, signer)
    lie(fake, {**OTHER.to_json(), "artifactType": BUNDLE_TYPE})
    with pytest.raises(VerificationError) as caught:
        verify(client, signer)
    assert caught.value.code == "unsigned"


def test_list_that_names_the_signature_of_something_else(fake, client, signer):
    entry = sign(client, signer, OTHER)
    lie(fake, entry.to_json())
    with pytest.raises(VerificationError) as caught:
        verify(client, signer)
    assert caught.value.code == "subject-mismatch"


def test_referrer_that_carries_the_statement_of_something_else(fake, client, signer):
    sign(client, signer, SUBJECT, signature_statement(OTHER.digest))
    with pytest.raises(VerificationError) as caught:
        verify(client, signer)
    assert caught.value.code == "subject-mismatch"


def test_list_that_names_the_subject_itself(fake, client, signer):
    client.put_manifest("a/b", "v1", manifest(), MANIFEST_TYPE)
    lie(fake, {**SUBJECT.to_json(), "artifactType": BUNDLE_TYPE})
    with pytest.raises(VerificationError) as caught:
        verify(client, signer)
    assert caught.value.code == "unsigned"


def test_rubbish_beside_a_good_signature_does_no_harm(fake, client, signer):
    entry = sign(client, signer)
    rubbish = {**OTHER.to_json(), "artifactType": BUNDLE_TYPE}
    lie(fake, rubbish, {**entry.to_json(), "annotations": {}}, rubbish)
    assert verify(client, signer)


def test_list_that_is_too_long(fake, client, signer):
    entries = [
        {**describe(str(n).encode(), MANIFEST_TYPE).to_json(), "artifactType": BUNDLE_TYPE}
        for n in range(MAX_CANDIDATES + 1)
    ]
    lie(fake, *entries)
    with pytest.raises(VerificationError) as caught:
        verify(client, signer)
    assert caught.value.code == "too-many-referrers"
    lie(fake, *(describe(str(n).encode(), MANIFEST_TYPE).to_json() for n in range(1001)))
    fake.faults = fake.faults[1:]
    with pytest.raises(VerificationError) as caught:
        client.referrers("a/b", SUBJECT.digest)
    assert caught.value.code == "too-many-referrers"


@pytest.mark.parametrize("junk", [b"", b"{}", b"[]", b'{"schemaVersion":2,"manifests":[{}]}'])
def test_list_that_is_junk(fake, client, junk):
    fake.fail("GET", "referrers", faults.body(junk, Content_Type=INDEX_TYPE))
    with pytest.raises(VerificationError):
        client.referrers("a/b", SUBJECT.digest)


def test_web_page_in_place_of_the_api(fake, client, signer):
    fake.referrers = False
    entry = sign(client, signer)
    page = faults.body(b"<html>", Content_Type="text/html")
    fake.fail("GET", "referrers", page, times=99)
    assert client.referrers("a/b", SUBJECT.digest) == (entry,)


def test_fallback_tag_that_leads_to_the_subject_itself(fake, client):
    fake.referrers = False
    fake.manifests["a/b", TAG] = (MANIFEST_TYPE, manifest())
    assert client.referrers("a/b", SUBJECT.digest) == ()


def test_list_over_several_pages(fake, client, signer):
    entry = sign(client, signer)
    first = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [OTHER.to_json()]}
    link = f'</v2/a/b/referrers/{SUBJECT.digest}?page=2>; rel="next"'
    fake.fail(
        "GET", "referrers", faults.body(encode_json(first), Content_Type=INDEX_TYPE, Link=link)
    )
    assert client.referrers("a/b", SUBJECT.digest) == (OTHER, entry)


def test_pages_without_end(fake, client):
    link = f'</v2/a/b/referrers/{SUBJECT.digest}?page=2>; rel="next"'
    empty = encode_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []})
    fake.fail(
        "GET", "referrers", faults.body(empty, Content_Type=INDEX_TYPE, Link=link), times=9999
    )
    with pytest.raises(VerificationError):
        client.referrers("a/b", SUBJECT.digest)
