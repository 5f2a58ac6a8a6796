"""Manifests and tags over the wire: right bytes, an error of ours, or nothing."""

import json
import socket

import pytest
import testing_registry as faults

from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.model.oci import (
    EMPTY,
    EMPTY_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    describe,
    encode_json,
)
from smolbuild.model.reference import parse_reference
from smolbuild.registry.retry import Timeouts

MANIFEST = encode_json(
    {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": describe(EMPTY, EMPTY_TYPE).to_json(),
        "layers": [],
    }
)
DIGEST = digest_bytes(MANIFEST)


def put(fake, data=MANIFEST, media_type=MANIFEST_TYPE, *references):
    for reference in references or ("v1", digest_bytes(data)):
        fake.manifests["a/b", reference] = (media_type, data)


def test_round_trip(fake, client):
    descriptor = client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)
    assert descriptor == describe(MANIFEST, MANIFEST_TYPE)
    assert client.get_manifest("a/b", "v1") == (MANIFEST, descriptor)
    assert client.get_manifest("a/b", DIGEST) == (MANIFEST, descriptor)
    assert client.head_manifest(parse_reference(f"{fake.host}/a/b:v1")) == descriptor
    assert client.head_manifest(parse_reference(f"{fake.host}/a/b@{DIGEST}")) == descriptor
    assert client.head_manifest(parse_reference(f"{fake.host}/a/b:v2")) is None


def test_index_keeps_its_type(client):
    data = encode_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []})
    client.put_manifest("a/b", "v1", data, INDEX_TYPE)
    assert client.get_manifest("a/b", "v1")[1].media_type == INDEX_TYPE


def test_head_of_a_registry_that_says_little(fake, client):
    put(fake)
    fake.fail("HEAD", "manifests", faults.status(200))
    assert client.head_manifest(parse_reference(f"{fake.host}/a/b:v1")).digest == DIGEST


def test_tags_over_several_pages(fake, client):
    put(fake, MANIFEST, MANIFEST_TYPE, *"edcba")
    assert client.tags("a/b") == tuple("abcde")
    assert fake.count("GET", "tags") == 3
    with pytest.raises(RegistryError) as caught:
        client.tags("no/such")
    assert caught.value.code == "name-unknown"


def test_tags_page_on_another_host_is_refused(fake, client):
    put(fake)
    link = '<http://127.0.0.1:1/v2/a/b/tags/list>; rel="next"'
    fake.fail("GET", "tags", faults.body(b'{"tags":["x"]}', Link=link))
    with pytest.raises(VerificationError):
        client.tags("a/b")


@pytest.mark.parametrize("reference", ["v1", DIGEST])
def test_wrong_bytes(fake, client, reference):
    fake.manifests["a/b", reference] = (MANIFEST_TYPE, MANIFEST + b" ")
    fake.fail("GET", "manifests", faults.body(
        MANIFEST + b" ", Content_Type=MANIFEST_TYPE, Docker_Content_Digest=DIGEST
    ))  # fmt: skip
    with pytest.raises(VerificationError) as caught:
        client.get_manifest("a/b", reference)
    assert caught.value.code == "digest-mismatch"
    assert caught.value.exit_status == 4


def test_head_of_a_digest_with_another_one(fake, client):
    other = "sha256:" + "0" * 64
    put(fake, MANIFEST, MANIFEST_TYPE, other)
    with pytest.raises(VerificationError):
        client.head_manifest(parse_reference(f"{fake.host}/a/b@{other}"))


@pytest.mark.parametrize("send", [faults.body, faults.chunked])
def test_too_large(fake, client, send):
    data = b" " * (MAX_MANIFEST_BYTES + 1)
    fake.fail("GET", "manifests", send(data, Content_Type=MANIFEST_TYPE))
    with pytest.raises(VerificationError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "too-large"


def test_too_large_to_put(client, fake):
    with pytest.raises(RegistryError) as caught:
        client.put_manifest("a/b", "v1", b" " * (MAX_MANIFEST_BYTES + 1), MANIFEST_TYPE)
    assert caught.value.code == "manifest-too-large"
    assert not fake.seen


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "", "application/json"])
def test_not_a_registry(fake, client, kind):
    fake.fail("GET", "manifests", faults.body(b"<html>log in</html>", Content_Type=kind))
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "unexpected-type"


def test_body_of_another_type_than_its_header(fake, client):
    put(fake, MANIFEST, INDEX_TYPE)
    with pytest.raises(VerificationError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "malformed"


def test_registry_stores_something_else(fake, client):
    fake.fail("PUT", "manifests", faults.status(201, Docker_Content_Digest="sha256:" + "0" * 64))
    with pytest.raises(VerificationError):
        client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)


def test_truncated_once(fake, client):
    put(fake)
    fake.fail("GET", "manifests", faults.cut_down(10))
    assert client.get_manifest("a/b", "v1")[0] == MANIFEST


def test_truncated_always(fake, client):
    put(fake)
    fake.fail("GET", "manifests", faults.cut_down(10), times=99)
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "unreachable"
    assert fake.count("GET", "manifests") == 3


@pytest.mark.parametrize(
    ("code", "error", "named"),
    [
        (401, "", "unauthorized"),
        (403, "DENIED", "denied"),
        (404, "MANIFEST_UNKNOWN", "not-found"),
        (404, "NAME_UNKNOWN", "name-unknown"),
        (404, "", "not-found"),
        (400, "NAME_INVALID", "rejected"),
        (418, "", "rejected"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_refusals_are_final(fake, client, method, code, error, named, clock):
    fake.fail(method, "manifests", faults.status(code, error), times=99)
    reference = parse_reference(f"{fake.host}/a/b:v1")
    action = {
        "GET": lambda: client.get_manifest("a/b", "v1"),
        "HEAD": lambda: client.head_manifest(reference),
        "PUT": lambda: client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE),
    }[method]
    if method == "HEAD" and code == 404:
        assert action() is None
    else:
        with pytest.raises(RegistryError) as caught:
            action()
        # A HEAD has no body to say NAME_UNKNOWN in.
        assert caught.value.code == named
        assert caught.value.exit_status == 5
        assert caught.value.hint
        assert fake.host in caught.value.message
    assert len(fake.seen) == 1
    assert not clock.slept


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_trouble_that_passes(fake, client, code, clock):
    put(fake)
    fake.fail("*", "manifests", faults.status(code), times=2)
    assert client.get_manifest("a/b", "v1")[0] == MANIFEST
    assert fake.count("GET", "manifests") == 3
    assert len(clock.slept) == 2


@pytest.mark.parametrize(("code", "named"), [(429, "rate-limited"), (503, "unavailable")])
def test_trouble_that_stays(fake, client, code, named):
    fake.fail("*", "manifests", faults.status(code, "TOOMANYREQUESTS"), times=99)
    with pytest.raises(RegistryError) as caught:
        client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)
    assert caught.value.code == named
    assert "toomanyrequests" in caught.value.message
    assert len(fake.seen) == 3


def test_who_waits_is_told_that_it_is_tried_again(fake, make_client):
    said = []
    fake.fail("GET", "manifests", faults.status(503), times=2)
    put(fake)
    make_client(fake, emit=said.append).get_manifest("a/b", "v1")
    assert [event.text.partition(": ")[0] for event in said] == [f"registry {fake.host}"] * 2
    assert said[1].text.endswith("(attempt 3 of 3)")


def test_retry_after_is_obeyed(fake, client, clock):
    put(fake)
    fake.fail("GET", "manifests", faults.status(429, Retry_After="7"))
    client.get_manifest("a/b", "v1")
    assert 7 <= sum(clock.slept) < 8


def test_retry_after_as_a_date(fake, client, clock):
    put(fake)
    date = "Tue, 14 Nov 2023 22:13:32 GMT"  # 12 seconds after the fake clock's beginning
    fake.fail("GET", "manifests", faults.status(503, Retry_After=date))
    client.get_manifest("a/b", "v1")
    assert 12 <= sum(clock.slept) < 13


def test_retry_after_beyond_patience_is_an_error_at_once(fake, client, clock):
    fake.fail("GET", "manifests", faults.status(429, Retry_After="3600"))
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "rate-limited"
    assert not clock.slept


def test_nothing_listens(make_client):
    with socket.socket() as taken:  # bound, but not listening: nobody else can get the port
        taken.bind(("127.0.0.1", 0))
        client = make_client(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RegistryError) as caught:
            client.get_manifest("a/b", "v1")
    assert caught.value.code == "unreachable"
    assert "refused" in caught.value.message
    assert "local data is intact" in caught.value.hint


def test_hung_up_without_a_word(fake, client):
    put(fake)
    fake.fail("GET", "manifests", faults.hang_up, times=2)
    assert client.get_manifest("a/b", "v1")[0] == MANIFEST


@pytest.mark.parametrize("drip", [faults.drip_head, faults.drip_body, faults.never_answer])
def test_slow_loris(fake, make_client, drip):
    fake.fail("GET", "manifests", drip, times=99)
    client = make_client(fake, timeouts=Timeouts(connect=2, read=0.15, floor=1_000_000))
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "unreachable"
    assert fake.count("GET", "manifests") == 3


def test_what_a_registry_says_is_made_printable(fake, client):
    evil = {"errors": [{"code": "DENIED", "message": "no\x1b[2J\n\u202eway" + "x" * 999}]}
    fake.fail("GET", "manifests", faults.body(json.dumps(evil).encode(), 403))
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("junk", [b"", b"[]", b"null", b'{"errors":3}', b'{"errors":[3]}',
                                  b'{"errors":[{"code":3,"message":4}]}', b"[" * 100_000,
                                  b"\xff\xfe"])  # fmt: skip
def test_junk_in_an_error_answer(fake, client, junk):
    fake.fail("GET", "manifests", faults.body(junk, 403))
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    assert caught.value.code == "denied"
