"""Keys: made once, private, P-256 only."""

import base64
import hashlib
import os
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.errors import UsageError
from smolbuild.trust.keys import (
    PublicKey,
    generate_key,
    load_private_key,
    load_public_key,
    parse_public_key,
)


def write(path, key, password=None, mode=0o600, form=serialization.PrivateFormat.PKCS8):
    protection = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protection))
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def p256():
    return ec.generate_private_key(ec.SECP256R1())


def test_generate_and_load(tmp_path):
    path = tmp_path / "ci.pem"
    public = generate_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["ci.pem"]  # no temporary file is left
    signer = load_private_key(path)
    assert signer.public == public
    signature = signer.sign(b"data")
    assert public.verify(b"data", signature)
    assert not public.verify(b"Data", signature)
    assert not generate_key(tmp_path / "other.pem").verify(b"data", signature)


def test_generate_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        generate_key(tmp_path / "k")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


def test_generate_never_replaces(tmp_path):
    path = tmp_path / "ci.pem"
    generate_key(path)
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        generate_key(path)
    assert caught.value.code == "key-exists"
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ci.pem"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError):
        generate_key(tmp_path / "link")


def test_generate_where_there_is_no_directory(tmp_path):
    with pytest.raises(UsageError):
        generate_key(tmp_path / "no" / "ci.pem")


def test_hint_fingerprint_and_pem(tmp_path, p256):
    spki = p256.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    pem = p256.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    key = PublicKey(spki)
    assert key.hint == base64.b64encode(hashlib.sha256(spki).digest()).decode()
    assert key.fingerprint == "sha256:" + hashlib.sha256(spki).hexdigest()
    assert key.pem.encode() == pem
    (tmp_path / "k.pub").write_text(key.pem)
    assert load_public_key(tmp_path / "k.pub") == key


def test_encrypted_key(tmp_path, p256):
    path = write(tmp_path / "k", p256, b"pass word")
    assert load_private_key(path, lambda: "pass word").public.verify(
        b"x", load_private_key(path, lambda: "pass word").sign(b"x")
    )
    for password in (lambda: "wrong", lambda: "", None):
        with pytest.raises(UsageError) as caught:
            load_private_key(path, password)
        assert caught.value.code == "key-password"


def test_password_is_not_asked_for_a_plain_key(tmp_path, p256):
    def ask():
        raise AssertionError

    load_private_key(write(tmp_path / "k", p256), ask)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o700 | 0o010])
def test_too_open(tmp_path, p256, mode):
    with pytest.raises(UsageError) as caught:
        load_private_key(write(tmp_path / "k", p256, mode=mode))
    assert caught.value.code == "key-permissions"
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize(
    "make",
    [
        lambda: ec.generate_private_key(ec.SECP384R1()),
        lambda: ec.generate_private_key(ec.SECP256K1()),
        ed25519.Ed25519PrivateKey.generate,
        lambda: rsa.generate_private_key(65537, 2048),
    ],
)
def test_other_kinds_of_keys(tmp_path, make):
    key = make()
    with pytest.raises(UsageError) as caught:
        load_private_key(write(tmp_path / "k", key))
    assert caught.value.code == "key-type"
    pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with pytest.raises(UsageError) as caught:
        parse_public_key(pem)
    assert caught.value.code == "key-type"


EMPTY_PEM = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("data", [b"", b"junk", EMPTY_PEM, b"x" * 100_000])
def test_files_that_hold_no_key(tmp_path, data):
    path = tmp_path / "k"
    path.write_bytes(data)
    path.chmod(0o600)
    for load in (load_private_key, load_public_key):
        with pytest.raises(UsageError) as caught:
            load(path)
        assert caught.value.code == "key"


def test_private_key_where_the_public_one_is_wanted(tmp_path, p256):
    with pytest.raises(UsageError, match="give the public one"):
        load_public_key(write(tmp_path / "k", p256))


def test_missing_file_and_directory(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError):
            load_private_key(path)
        with pytest.raises(UsageError):
            load_public_key(path)


def test_secrets_are_not_shown(tmp_path):
    generate_key(tmp_path / "k")
    assert "_key" not in repr(load_private_key(tmp_path / "k"))


@given(st.binary(max_size=200))
def test_any_signature_is_refused_quietly(data):
    key = ec.derive_private_key(7, ec.SECP256R1()).public_key()
    spki = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert not PublicKey(spki).verify(b"data", data)


@given(st.binary(max_size=200))
def test_any_public_key_file_is_a_key_or_a_usage_error(data):
    with pytest.raises(UsageError):
        parse_public_key(b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(data) + b"\n"
                         b"-----END PUBLIC KEY-----\n")  # fmt: skip
