"""Our signatures before verifiers that are not ours: Sigstore's JavaScript one, and OpenSSL.

``make test`` installs both. They are not skipped where they are missing: then nothing but our own
code would say that the signatures are right.
"""

import json
import shutil
from pathlib import Path

import pytest

from smolbuild.core.digest import digest_bytes, hex_of
from smolbuild.core.process import run
from smolbuild.model.oci import encode_json
from smolbuild.trust.bundle import parse_bundle, sign_statement
from smolbuild.trust.keys import generate_key, load_private_key
from smolbuild.trust.statement import (
    Builder,
    Provenance,
    provenance_statement,
    result_statement,
    signature_statement,
)

NODE = Path(__file__).parent / "node"
SUBJECT = digest_bytes(b"the index of an artifact")
STATEMENTS = {
    "signature": signature_statement(
        SUBJECT, {"repository": "registry.example.com/acme/env", "tag": "größe-1"}
    ),
    "provenance": provenance_statement(
        SUBJECT,
        Provenance(
            build_type="https://smolbuild.example.com/build/v1",
            external_parameters={"source": "Smolfile"},
            builder=Builder(id="https://smolbuild.example.com/laptop"),
        ),
    ),
    "test-result": result_statement(SUBJECT, result="PASSED", configuration=[]),
}


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "ci.pem"
    generate_key(path)
    return load_private_key(path)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "other.pem"
    generate_key(path)
    return load_private_key(path)


@pytest.fixture(params=STATEMENTS)
def statement(request):
    return STATEMENTS[request.param]


@pytest.fixture
def sigstore(tmp_path):
    """Give a function that has Sigstore's verifier judge a bundle: the payload, or None."""
    if shutil.which("node") is None:
        pytest.fail("node is missing: `make test` installs it (Debian: nodejs, npm)")
    if not (NODE / "node_modules" / "@sigstore" / "verify").is_dir():
        pytest.fail(f"@sigstore/verify is missing: `make test` installs it (`npm ci` in {NODE})")

    def judge(bundle, public):
        (tmp_path / "bundle.json").write_bytes(bundle)
        (tmp_path / "key.pem").write_text(public.pem)
        payload = tmp_path / "payload"
        payload.unlink(missing_ok=True)
        files = [str(tmp_path / "bundle.json"), str(tmp_path / "key.pem"), str(payload)]
        done = run(["node", str(NODE / "verify.js"), *files], timeout=60)
        assert done.status in {0, 3}, done.stderr.decode()
        return payload.read_bytes() if done.status == 0 else None

    return judge


def test_sigstore_accepts_ours(sigstore, signer, statement):
    payload = sigstore(sign_statement(statement, signer), signer.public)
    assert payload == statement.encode()
    assert json.loads(payload)["subject"][0]["digest"] == {"sha256": hex_of(SUBJECT)}


def test_sigstore_rejects_another_key(sigstore, signer, stranger, statement):
    assert sigstore(sign_statement(statement, signer), stranger.public) is None
    value = json.loads(sign_statement(statement, stranger))
    value["verificationMaterial"]["publicKey"]["hint"] = signer.public.hint
    assert sigstore(encode_json(value), signer.public) is None


def test_sigstore_rejects_a_tampered_one(sigstore, signer):
    good = json.loads(sign_statement(signature_statement(SUBJECT), signer))
    other = json.loads(sign_statement(signature_statement(digest_bytes(b"something else")), signer))
    good["dsseEnvelope"]["payload"] = other["dsseEnvelope"]["payload"]
    assert sigstore(encode_json(good), signer.public) is None
    assert sigstore(b"not a bundle", signer.public) is None


def test_openssl(tmp_path, signer, stranger, statement):
    """``openssl dgst`` over the pre-authentication encoding."""
    bundle = parse_bundle(sign_statement(statement, signer))
    signed, signature = tmp_path / "signed", tmp_path / "signature"
    signature.write_bytes(bundle.signature)

    def accepts(public, data):
        signed.write_bytes(data)
        (tmp_path / "key.pem").write_text(public.pem)
        done = run(
            ["openssl", "dgst", "-sha256", "-verify", str(tmp_path / "key.pem"),
             "-signature", str(signature), str(signed)],
            timeout=60,
        )  # fmt: skip
        return done.status == 0 and b"Verified OK" in done.stdout

    assert accepts(signer.public, bundle.signed_bytes)
    assert not accepts(stranger.public, bundle.signed_bytes)
    assert not accepts(signer.public, bundle.signed_bytes + b" ")
    assert not accepts(signer.public, bundle.payload)


def test_openssl_reads_our_key_file(tmp_path):
    public = generate_key(tmp_path / "ci.pem")
    done = run(["openssl", "pkey", "-in", str(tmp_path / "ci.pem"), "-pubout"], timeout=60)
    assert done.stdout.decode() == public.pem
