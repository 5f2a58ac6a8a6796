"""Bundles, statements, referrers: the exact bytes, strict parsing, every check by its code."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.digest import digest_bytes, hex_of
from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.model.oci import (
    BUNDLE_TYPE,
    EMPTY,
    EMPTY_TYPE,
    MANIFEST_TYPE,
    describe,
    encode_json,
    parse_index,
    parse_manifest,
)
from smolbuild.trust.bundle import encode_bundle, parse_bundle, sign_statement
from smolbuild.trust.dsse import PAYLOAD_TYPE, pae
from smolbuild.trust.keys import generate_key, load_private_key
from smolbuild.trust.referrer import parse_referrer, referrer_manifest
from smolbuild.trust.statement import (
    PROVENANCE_TYPE,
    SIGN_TYPE,
    TEST_RESULT_TYPE,
    Builder,
    Provenance,
    Resource,
    Statement,
    Subject,
    parse_statement,
    provenance_statement,
    result_statement,
    signature_statement,
)
from smolbuild.trust.verify import verify_bundle, verify_signed

SUBJECT = digest_bytes(b"manifest")
OTHER = digest_bytes(b"other manifest")


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "k"
    generate_key(path)
    return load_private_key(path)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "k"
    generate_key(path)
    return load_private_key(path)


def keys(*signers):
    return {signer.public.hint: signer.public for signer in signers}


def verify(bundle, signer, subject=SUBJECT, predicate_type=SIGN_TYPE):
    return verify_bundle(bundle, subject=subject, predicate_type=predicate_type, keys=keys(signer))


# -- the bytes


def test_pae():
    assert pae(b"hello", "http://example.com/HelloWorld") == (
        b"DSSEv1 29 http://example.com/HelloWorld 5 hello"  # the DSSE specification's own example
    )
    assert pae(b"{}") == b"DSSEv1 28 application/vnd.in-toto+json 2 {}"


def test_signature_statement_as_cosign_writes_it():
    assert signature_statement(SUBJECT).encode() == (
        b'{"_type":"https://in-toto.io/Statement/v1","subject":[{"digest":{"sha256":"'
        + hex_of(SUBJECT).encode()
        + b'"},"annotations":{}}],"predicateType":"https://sigstore.dev/cosign/sign/v1",'
        b'"predicate":{}}'
    )


def test_bundle_bytes(signer):
    data = encode_bundle(b"payload", signature=b"sig", hint="hint=")
    assert data == (
        b'{"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json",'
        b'"verificationMaterial":{"publicKey":{"hint":"hint="}},'
        b'"dsseEnvelope":{"payload":"cGF5bG9hZA==","payloadType":"application/vnd.in-toto+json",'
        b'"signatures":[{"sig":"c2ln"}]}}'
    )
    parsed = parse_bundle(data)
    assert (parsed.payload, parsed.signature, parsed.hint) == (b"payload", b"sig", "hint=")
    assert parsed.signed_bytes == pae(b"payload")


def test_referrer_bytes():
    subject = describe(b"manifest", MANIFEST_TYPE)
    data = referrer_manifest(b"bundle", subject=subject, predicate_type="https://p", created=0.9)
    assert json.loads(data) == {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": BUNDLE_TYPE,
        "config": {
            "mediaType": EMPTY_TYPE,
            "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
            "size": 2,
        },
        "layers": [describe(b"bundle", BUNDLE_TYPE).to_json()],
        "subject": subject.to_json(),
        "annotations": {
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": "https://p",
            "org.opencontainers.image.created": "1970-01-01T00:00:00Z",
        },
    }
    assert parse_referrer(data, subject=subject.digest) == describe(b"bundle", BUNDLE_TYPE)
    with pytest.raises(VerificationError) as caught:
        parse_referrer(data, subject=OTHER)
    assert caught.value.code == "subject-mismatch"


def test_provenance():
    made = Provenance(
        build_type="https://example.com/build/v1",
        external_parameters={"source": "Smolfile"},
        builder=Builder(id="https://example.com/laptop", version={"smolbuild": "1"}),
        internal_parameters={"memory": 512},
        resolved_dependencies=[Resource(name="base", uri="pkg:oci/x", digest={"sha256": "ab"})],
        invocation_id="id",
        started_on="2026-01-01T00:00:00Z",
        byproducts=[Resource(name="console", digest={"sha256": "cd"})],
        extensions={"smolbuild_checkpoint": {"cpu": "max"}},
    )
    statement = parse_statement(provenance_statement(SUBJECT, made).encode())
    assert statement.predicate_type == PROVENANCE_TYPE
    assert statement.predicate == {
        "buildDefinition": {
            "buildType": "https://example.com/build/v1",
            "externalParameters": {"source": "Smolfile"},
            "internalParameters": {"memory": 512},
            "resolvedDependencies": [
                {"name": "base", "uri": "pkg:oci/x", "digest": {"sha256": "ab"}}
            ],
        },
        "runDetails": {
            "builder": {"id": "https://example.com/laptop", "version": {"smolbuild": "1"}},
            "metadata": {"invocationId": "id", "startedOn": "2026-01-01T00:00:00Z"},
            "byproducts": [{"name": "console", "digest": {"sha256": "cd"}}],
            "smolbuild_checkpoint": {"cpu": "max"},
        },
    }


def test_test_result():
    statement = result_statement(
        SUBJECT, result="PASSED", configuration=[Resource(name="health")], passed=["restore"]
    )
    assert statement.predicate_type == TEST_RESULT_TYPE
    assert parse_statement(statement.encode()) == statement
    assert statement.predicate["passedTests"] == ["restore"]


# -- the checks


def test_good_signature(signer):
    bundle = sign_statement(signature_statement(SUBJECT, {"repository": "r", "tag": "t"}), signer)
    statement = verify(bundle, signer)
    assert statement.subject(SUBJECT).annotations == {"repository": "r", "tag": "t"}


def code_of(bundle, signer, **options):
    with pytest.raises(VerificationError) as caught:
        verify(bundle, signer, **options)
    assert caught.value.exit_status == 4
    return caught.value.code


def test_each_check_has_its_code(signer, stranger):
    good = sign_statement(signature_statement(SUBJECT), signer)
    assert code_of(good, stranger) == "wrong-key"
    assert code_of(good, signer, subject=OTHER) == "subject-mismatch"
    assert code_of(good, signer, predicate_type=PROVENANCE_TYPE) == "predicate-mismatch"
    assert code_of(b"junk", signer) == "malformed"
    assert code_of(b"", signer) == "malformed"


def test_the_hint_only_selects(signer, stranger):
    payload = signature_statement(SUBJECT).encode()
    forged = encode_bundle(payload, signature=stranger.sign(pae(payload)), hint=signer.public.hint)
    assert code_of(forged, signer) == "bad-signature"


@pytest.mark.parametrize("swap", ["payload", "signature"])
def test_tampered(signer, swap):
    first = json.loads(sign_statement(signature_statement(SUBJECT), signer))
    second = json.loads(sign_statement(signature_statement(OTHER), signer))
    if swap == "payload":
        first["dsseEnvelope"]["payload"] = second["dsseEnvelope"]["payload"]
        subject = OTHER
    else:
        first["dsseEnvelope"]["signatures"] = second["dsseEnvelope"]["signatures"]
        subject = SUBJECT
    assert code_of(encode_json(first), signer, subject=subject) == "bad-signature"


def test_every_flipped_byte_is_noticed(signer):
    bundle = sign_statement(signature_statement(SUBJECT), signer)
    for position in range(len(bundle)):
        bad = bytearray(bundle)
        bad[position] ^= 1
        assert code_of(bytes(bad), signer) in {
            "malformed",
            "wrong-key",
            "bad-signature",
        }


def test_signature_without_the_encoding_is_not_enough(signer):
    payload = signature_statement(SUBJECT).encode()
    bundle = encode_bundle(payload, signature=signer.sign(payload), hint=signer.public.hint)
    assert code_of(bundle, signer) == "bad-signature"


def test_signed_nonsense_is_malformed(signer):
    for payload in (b"{}", b"[]", b"\xff", b"x", b"null"):
        bundle = encode_bundle(
            payload, signature=signer.sign(pae(payload)), hint=signer.public.hint
        )
        assert code_of(bundle, signer) == "malformed"


def change(bundle, *path, to):
    value = json.loads(bundle)
    inner = value
    for step in path[:-1]:
        inner = inner[step]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return encode_json(value)


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("mediaType",), "application/vnd.dev.sigstore.bundle+json;version=0.2"),
        (("mediaType",), None),
        (("extra",), 1),
        (("verificationMaterial", "certificate"), {}),
        (("verificationMaterial", "publicKey"), None),
        (("verificationMaterial", "publicKey", "hint"), ""),
        (("verificationMaterial", "publicKey", "hint"), 3),
        (("verificationMaterial", "publicKey", "hint"), "x" * 1000),
        (("dsseEnvelope", "payloadType"), "text/plain"),
        (("dsseEnvelope", "payload"), "!!!"),
        (("dsseEnvelope", "payload"), "AAAA AAAA"),
        (("dsseEnvelope", "payload"), "AB=="),
        (("dsseEnvelope", "payload"), "é"),
        (("dsseEnvelope", "payload"), ""),
        (("dsseEnvelope", "signatures"), []),
        (("dsseEnvelope", "signatures"), [{"sig": "AAAA"}, {"sig": "AAAA"}]),
        (("dsseEnvelope", "signatures"), {"sig": "AAAA"}),
        (("dsseEnvelope", "signatures", 0, "keyid"), "x"),
        (("dsseEnvelope", "signatures", 0, "sig"), base64.b64encode(bytes(500)).decode()),
        (("dsseEnvelope", "signatures", 0, "sig"), None),
    ],
)
def test_strict_bundle(signer, path, to):
    bundle = sign_statement(signature_statement(SUBJECT), signer)
    assert code_of(change(bundle, *path, to=to), signer) == "malformed"


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("_type",), "https://in-toto.io/Statement/v0.1"),
        (("extra",), 1),
        (("predicateType",), ""),
        (("predicateType",), 3),
        (("predicate",), []),
        (("subject",), []),
        (("subject",), {}),
        (("subject",), [{"digest": {"sha256": "00"}}]),
        (("subject", 0), "x"),
        (("subject", 0, "unknown"), 1),
        (("subject", 0, "name"), 1),
        (("subject", 0, "annotations"), []),
        (("subject", 0, "digest"), {}),
        (("subject", 0, "digest"), {"sha512": "00"}),
        (("subject", 0, "digest", "sha256"), "AB" * 32),
        (("subject", 0, "digest"), {str(n): "00" for n in range(33)}),
        (("subject",), [{"digest": {"sha256": "00" * 32}}] * 1025),
    ],
)
def test_strict_statement(path, to):
    with pytest.raises(VerificationError) as caught:
        parse_statement(change(signature_statement(SUBJECT).encode(), *path, to=to))
    assert caught.value.code == "malformed"


def test_older_cosign_left_the_predicate_out():
    data = change(signature_statement(SUBJECT).encode(), "predicate", to=None)
    assert parse_statement(data).predicate == {}


# -- candidates


class Evidence:
    def __init__(self):
        self.entries, self.data = [], {}

    def add(self, bundle, subject, predicate_type=SIGN_TYPE):
        manifest = referrer_manifest(
            bundle, subject=subject, predicate_type=predicate_type, created=0
        )
        return self.add_manifest(manifest, bundle)

    def add_manifest(self, manifest, *blobs):
        entry = describe(manifest, MANIFEST_TYPE)
        self.entries.append(entry)
        for data in (manifest, *blobs):
            self.data[digest_bytes(data)] = data
        return entry

    def referrers(self, subject):
        return self.entries

    def manifest(self, descriptor):
        return self.data[descriptor.digest]

    def blob(self, descriptor):
        return self.data[descriptor.digest]


MANIFEST = describe(b"manifest", MANIFEST_TYPE)


def find(evidence, *signers):
    return verify_signed(MANIFEST, evidence, predicate_type=SIGN_TYPE, keys=keys(*signers))


def failure(evidence, *signers):
    with pytest.raises(VerificationError) as caught:
        find(evidence, *signers)
    return caught.value


def test_one_good_candidate_is_enough(signer, stranger):
    evidence = Evidence()
    evidence.add(b"junk", MANIFEST)
    evidence.add(sign_statement(signature_statement(SUBJECT), stranger), MANIFEST)
    evidence.add_manifest(b"{}")
    good = sign_statement(signature_statement(SUBJECT), signer)
    evidence.add(good, MANIFEST, "https://wrong.example.com/annotation")
    found = find(evidence, signer)
    assert found.key == signer.public
    assert found.bundle == digest_bytes(good)


def test_nothing_attached_and_only_rubbish_attached(signer):
    assert failure(Evidence(), signer).code == "unsigned"
    evidence = Evidence()
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": [],
                "config": describe(EMPTY, EMPTY_TYPE).to_json()}  # fmt: skip
    evidence.add_manifest(encode_json(manifest))
    assert failure(evidence, signer).code == "unsigned"


def test_the_most_telling_failure_is_reported(signer, stranger):
    evidence = Evidence()
    evidence.add(b"junk", MANIFEST)
    assert failure(evidence, signer).code == "malformed"
    made = Statement(subjects=(Subject(digest=SUBJECT),), predicate_type=PROVENANCE_TYPE)
    evidence.add(sign_statement(made, signer), MANIFEST)
    assert failure(evidence, signer).code == "predicate-mismatch"  # provenance is no signature
    evidence.add(sign_statement(signature_statement(SUBJECT), stranger), MANIFEST)
    error = failure(evidence, signer)
    assert error.code == "wrong-key"
    assert f"a key you do not trust ({stranger.public.fingerprint})" in error.message
    assert [line.partition(":")[0] for line in error.details.splitlines()] == [
        "malformed",
        "predicate-mismatch",
    ]
    assert failure(evidence).code == "wrong-key"  # no trusted keys at all


def test_evidence_with_wrong_bytes(signer):
    evidence = Evidence()
    bundle = sign_statement(signature_statement(SUBJECT), signer)
    entry = evidence.add(bundle, MANIFEST)
    evidence.data[digest_bytes(bundle)] = bundle + b" "
    assert failure(evidence, signer).code == "digest-mismatch"
    evidence.data[entry.digest] = b"{}"
    assert failure(evidence, signer).code == "digest-mismatch"


def test_evidence_that_cannot_be_read_is_not_unsigned(signer):
    class Broken(Evidence):
        def manifest(self, descriptor):
            raise RegistryError("down", code="unreachable")

    evidence = Broken()
    evidence.add(b"x", MANIFEST)
    with pytest.raises(RegistryError):
        find(evidence, signer)


# -- anything at all

_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@st.composite
def mutated(draw, template):
    """A template with one to three of its members replaced, removed or added."""
    value = json.loads(template)
    for _ in range(draw(st.integers(1, 3))):
        inner = value
        while True:
            if isinstance(inner, dict) and inner:
                key = draw(st.sampled_from(sorted(inner)))
            elif isinstance(inner, list) and inner:
                key = draw(st.integers(0, len(inner) - 1))
            else:
                break
            if isinstance(inner[key], dict | list) and draw(st.booleans()):
                inner = inner[key]
                continue
            if isinstance(inner, dict) and draw(st.booleans()):
                inner.pop(key)
                inner[draw(st.sampled_from([key, "extra"]))] = draw(_value)
            else:
                inner[key] = draw(_value)
            break
    return json.dumps(value).encode()


def only_our_error(parse, data):
    said = "fine"
    try:
        parse(data)
    except VerificationError as error:
        said = error.message
    assert said.encode()  # can be printed in any case


TEMPLATE_MANIFEST = referrer_manifest(b"b", subject=MANIFEST, predicate_type="p", created=0)
TEMPLATE_INDEX = encode_json(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {**MANIFEST.to_json(), "platform": {"os": "linux"}, "annotations": {"a": "b"}}
        ],
    }
)


@given(st.binary(max_size=100) | mutated(encode_bundle(b"{}", signature=b"s", hint="h")))
def test_any_bundle(data):
    only_our_error(parse_bundle, data)


@given(st.binary(max_size=100) | mutated(signature_statement(SUBJECT, {"a": "b"}).encode()))
def test_any_statement(data):
    only_our_error(parse_statement, data)


@given(st.binary(max_size=100) | mutated(TEMPLATE_MANIFEST))
def test_any_manifest_and_referrer(data):
    only_our_error(parse_manifest, data)
    only_our_error(lambda d: parse_referrer(d, subject=SUBJECT), data)


@given(st.binary(max_size=100) | mutated(TEMPLATE_INDEX))
def test_any_index(data):
    only_our_error(parse_index, data)


@given(st.binary(min_size=1, max_size=300), st.text(max_size=20))
def test_bundle_round_trip(payload, note):
    data = encode_bundle(payload, signature=b"sig", hint="h" + note.encode().hex()[:20])
    assert parse_bundle(data).payload == payload
    assert json.loads(data)["dsseEnvelope"]["payloadType"] == PAYLOAD_TYPE


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=4))
def test_statement_round_trip(annotations):
    try:
        encoded = signature_statement(SUBJECT, annotations).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate has no UTF-8 form
    assert parse_statement(encoded) == signature_statement(SUBJECT, annotations)
