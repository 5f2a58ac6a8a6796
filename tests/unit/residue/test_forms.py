"""Each form of a secret is found in what an encoder makes of the secret and its neighbours."""

import base64
import json
import urllib.parse

from hypothesis import given
from hypothesis import strategies as st

from smolbuild.residue.forms import forms_of

secrets = st.binary(min_size=8, max_size=60).filter(lambda b: len(b.strip()) >= 8)


def forms(value: bytes, encoding: str) -> list[bytes]:
    return [form.data for form in forms_of(value) if form.encoding in {"raw", encoding}]


@given(secrets, st.binary(max_size=20), st.binary(max_size=20))
def test_base64_of_any_alignment(secret: bytes, before: bytes, after: bytes) -> None:
    whole = before + secret.strip() + after
    assert any(form in base64.b64encode(whole) for form in forms(secret, "base64"))
    url = base64.urlsafe_b64encode(whole)
    assert any(form in url for kind in ("base64", "base64url") for form in forms(secret, kind))


@given(secrets)
def test_hex_and_urls(secret: bytes) -> None:
    core = secret.strip()
    for text in (core.hex(), core.hex().upper()):
        assert text.encode() in forms(secret, "hex")
    for text in (urllib.parse.quote(core), urllib.parse.quote(core, safe="")):
        assert text.encode() in forms(secret, "URL")


@given(
    st.text(min_size=8, max_size=40).filter(lambda t: len(t.encode(errors="replace").strip()) > 7)
)
def test_text_encodings(text: str) -> None:
    try:
        value = text.encode()
        core = value.strip().decode()
    except UnicodeError:
        return
    for wide in (core.encode("utf-16-le"), core.encode("utf-16-be")):
        assert any(form in wide for form in forms(value, "UTF-16"))
    assert any(form in json.dumps({"a": core}).encode() for form in forms(value, "JSON"))


@given(secrets)
def test_no_form_is_shorter_than_it_must_be_and_none_twice(secret: bytes) -> None:
    found = [form.data for form in forms_of(secret)]
    assert len(found) == len(set(found))
    assert min(map(len, found)) >= 8


def test_a_form_does_not_show_itself() -> None:
    assert "hunter2hunter2" not in repr(forms_of(b"hunter2hunter2"))
