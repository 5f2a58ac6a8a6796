"""Secrets and tokens are found whole, torn, wrapped and encoded; their likes are not."""

import base64
import random
import string
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.residue.media import file_medium
from smolbuild.residue.scanner import Scanner
from smolbuild.residue.search import Residue, search

SECRET = b"correct-horse-battery-staple-7"
PAGE = 4096


@pytest.fixture(scope="session")
def scanner(tmp_path_factory: pytest.TempPathFactory) -> Scanner:
    return Scanner(tmp_path_factory.mktemp("scanner"))


@pytest.fixture
def look(scanner: Scanner, tmp_path: Path):
    def look(content: bytes, secret: bytes | None = SECRET, **options) -> Residue:
        file = tmp_path / "memory"
        file.write_bytes(content)
        secrets = {} if secret is None else {"TOKEN": secret}
        return search(scanner, [file_medium(file, "memory")], secrets, **options)

    return look


ANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ANY
@given(
    secret=st.binary(min_size=16, max_size=700).filter(
        lambda b: len(b.strip()) >= 16 and len(set(b)) > 9
    ),
    before=st.integers(0, 5000),
    form=st.sampled_from(["raw", "base64", "hex", "wrapped"]),
)
def test_a_secret_is_found_whatever_lies_before_it(look, secret, before, form) -> None:
    core = secret.strip()
    text = {
        "raw": core,
        "base64": base64.b64encode(b"user:" + core + b"\n"),
        "hex": core.hex().encode(),
        "wrapped": base64.encodebytes(core),
    }[form]
    found = look(b"\x01" * before + text, secret, shapes=False)
    assert found
    assert {trace.secret for trace in found} == {"TOKEN"}


@ANY
@given(
    secret=st.binary(min_size=16, max_size=3000).filter(
        lambda b: len(b.strip()) == len(b) and len(set(b)) > 9
    ),
    share=st.floats(0, 1),
)
def test_a_secret_that_a_page_border_tears_is_found(look, secret, share) -> None:
    """Its second part lies on another page, which comes first in physical memory."""
    cut = round(len(secret) * share)
    pages = [secret[cut:].ljust(PAGE, b"\x02"), bytes(PAGE), secret[:cut].rjust(PAGE, b"\x03")]
    assert look(b"".join(pages), secret, shapes=False)


def test_half_a_secret_inside_a_page_is_none(look) -> None:
    half = SECRET[: len(SECRET) // 2]
    assert look(b"x" * 100 + half + b"y" * 100, shapes=False) == ()
    assert look(b"x" * 100 + SECRET[len(half) :] + b"y" * 100, shapes=False) == ()


def test_a_long_secret_is_found_by_any_of_its_lines(look) -> None:
    key = pem(rsa.generate_private_key(65537, 2048))
    lines = key.split(b"\n")
    assert look(b"  " + lines[5] + b"\r\n", key, shapes=False)
    assert look(lines[0] + b"\n" + lines[-2], key, shapes=False) == ()


def test_a_trace_says_where_and_how(look) -> None:
    (trace,) = look(b"\0" * 5000 + SECRET.hex().encode())
    assert (trace.secret, trace.encoding, trace.address) == ("TOKEN", "hex", 5000)
    (trace,) = look(b"\0" * 77 + SECRET.decode().encode("utf-16-be"))
    assert (trace.encoding, trace.address) == ("UTF-16", 78)


# Shapes


def pem(key, *, kind=serialization.PrivateFormat.PKCS8, password: bytes | None = None) -> bytes:
    encryption = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return key.private_bytes(serialization.Encoding.PEM, kind, encryption)


KEYS = [
    pem(rsa.generate_private_key(65537, 2048)),
    pem(rsa.generate_private_key(65537, 2048), kind=serialization.PrivateFormat.TraditionalOpenSSL),
    pem(ec.generate_private_key(ec.SECP256R1())),
    pem(
        ec.generate_private_key(ec.SECP256R1()), kind=serialization.PrivateFormat.TraditionalOpenSSL
    ),
    pem(ed25519.Ed25519PrivateKey.generate()),
    pem(ed25519.Ed25519PrivateKey.generate(), kind=serialization.PrivateFormat.OpenSSH),
    pem(rsa.generate_private_key(65537, 2048), password=b"a password"),
    pem(
        rsa.generate_private_key(65537, 2048),
        kind=serialization.PrivateFormat.TraditionalOpenSSL,
        password=b"a password",
    ),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("written", ["plain", "crlf", "json", "indented"])
def test_private_keys_are_found_and_known_again(look, key: bytes, written: str) -> None:
    text = {
        "plain": key,
        "crlf": key.replace(b"\n", b"\r\n"),
        "json": key.replace(b"\n", b"\\n"),
        "indented": key.replace(b"\n", b"\n    "),
    }[written]
    (trace,) = look(b"a" * 500 + text, None)
    assert trace.token is not None
    assert trace.token.kind == "private key"
    (plain,) = look(key, None)
    assert plain.token == trace.token
    assert look(text, None, known={trace.token.fingerprint}) == ()


@pytest.mark.parametrize(
    "text",
    [
        b"-----BEGIN PRIVATE KEY-----\0-----END PRIVATE KEY-----\0-----BEGIN RSA PRIVATE KEY-----",
        b"-----BEGIN PRIVATE KEY-----\n<your key here>\n-----END PRIVATE KEY-----",
        b"-----BEGIN PRIVATE KEY-----\n" + b"A" * 100 + b"\n-----END PRIVATE KEY-----",
        b"-----BEGIN PUBLIC KEY-----\n" + KEYS[0].split(b"\n", 1)[1],
        b"AKIAIOSFODNN7EXAMPLE",
        b"ghp_" + b"x" * 36,
        b"a" + b"ghp_" + b"0123456789abcdefghijABCDEFGHIJ012345",
        b"npm_config_registry=http://registry.example.com/",
        b"half_" + b"abcdefghijklmnopqrstuvwxyzABCDEFGH",
    ],
)
def test_mentions_and_examples_are_no_tokens(look, text: bytes) -> None:
    assert look(text + b"\n", None) == ()


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(random.Random(7).choices(alphabet, k=count))


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("AWS access key", "AKIA" + letters(16, string.ascii_uppercase + "234567")),
        ("GitHub token", "ghp_" + letters(36)),
        ("GitHub token", "github_pat_" + letters(22) + "_" + letters(59)),
        ("GitLab token", "glpat-" + letters(20)),
        ("Slack token", "xoxb-123456789012-123456789012-" + letters(24)),
        ("Stripe key", "sk_live_" + letters(24)),
        ("Google API key", "AIza" + letters(35)),
        ("npm token", "npm_" + letters(36)),
        ("PyPI token", "pypi-AgEIcHlwaS5vcmc" + letters(80)),
        ("Hugging Face token", "hf_" + letters(34, string.ascii_letters)),
        ("SendGrid key", f"SG.{letters(22)}.{letters(43)}"),
    ],
)
def test_tokens_are_found_by_their_shape(look, kind: str, token: str) -> None:
    for text in (f"token={token}\n", f'"{token}"', f"\0{token}\0"):
        (trace,) = look(text.encode(), None)
        assert trace.token is not None
        assert trace.token.kind == kind
        assert token not in repr(trace)
