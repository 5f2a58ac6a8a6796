"""Logins, tokens, redirects, TLS: who gets which secret, and who does not."""

import base64
import datetime as dt
import io
import ipaddress
import json
import logging
import ssl
import threading
import traceback

import pytest
import testing_registry as faults
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from testing_registry import FakeRegistry

from smolbuild.core.errors import RegistryError, UsageError
from smolbuild.model.oci import EMPTY, EMPTY_TYPE, MANIFEST_TYPE, describe, encode_json
from smolbuild.registry.client import ca_bundle, connect
from smolbuild.registry.credentials import Credential, Credentials, load_credentials

DATA = b"some blob" * 1000
BLOB = describe(DATA, "application/octet-stream")
MANIFEST = encode_json(
    {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": describe(EMPTY, EMPTY_TYPE).to_json(),
        "layers": [],
    }
)


def push(client):
    client.push_blob("a/b", BLOB, lambda: io.BytesIO(DATA))


def pull(client):
    got = bytearray()
    client.pull_blob("a/b", BLOB, got.extend)
    return bytes(got)


def secrets(registry):
    pair = f"{registry.user}:{registry.password}".encode()
    return (registry.password, registry.refresh_token, base64.b64encode(pair).decode(), "token-s")


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_login(fake, make_client, login, auth):
    fake.auth = auth
    client = make_client(fake, credentials=login)
    assert not client.has_blob("a/b", BLOB)  # a token for reading must not be tried for writing
    push(client)
    assert pull(client) == DATA
    client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)
    assert client.get_manifest("a/b", "v1")[0] == MANIFEST
    if auth == "bearer":
        assert len(fake.tokens) == 2  # one to read, one to write


def test_mount_asks_for_both_repositories(fake, make_client, login):
    fake.auth = "bearer"
    fake.add_blob("c/d", DATA)
    assert make_client(fake, credentials=login).mount_blob("a/b", BLOB, "c/d")
    assert {"repository:a/b:pull,push", "repository:c/d:pull"} in fake.tokens.values()


def test_token_that_expired_is_replaced(fake, make_client, login):
    fake.auth = "bearer"
    client = make_client(fake, credentials=login)
    push(client)
    fake.expire_tokens()
    client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)
    assert client.get_manifest("a/b", "v1")[0] == MANIFEST


def test_token_that_expires_during_an_upload(fake, make_client, login):
    fake.auth = "bearer"

    def expire(h):
        h.registry.expire_tokens()
        h.serve()

    fake.fail("PUT", "uploads", expire)
    push(make_client(fake, credentials=login))
    assert fake.blobs["a/b", BLOB.digest] == DATA


def test_token_near_its_end_is_replaced_before_use(fake, make_client, login, clock):
    fake.auth = "bearer"
    client = make_client(fake, credentials=login)
    push(client)
    clock.time += 299
    fake.seen.clear()
    client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)
    assert [s.method for s in fake.seen] == ["GET", "PUT"]  # the token, then the manifest: no 401


def test_threads_share_one_token(fake, make_client, login):
    fake.auth = "bearer"
    fake.add_blob("a/b", DATA)
    client = make_client(fake, credentials=login)
    threads = [threading.Thread(target=pull, args=(client,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert fake.count("GET", "/token") == 1


@pytest.mark.parametrize("auth", ["basic", "bearer"])
@pytest.mark.parametrize("known", [False, True])
def test_missing_or_wrong_login(fake, make_client, auth, known, caplog):
    caplog.set_level(logging.DEBUG)
    fake.auth = auth
    wrong = Credential(username="alice", password="wrong-secret")
    credentials = Credentials(auths={fake.host: wrong} if known else {})
    client = make_client(fake, credentials=credentials)
    for action in (lambda: push(client), lambda: client.get_manifest("a/b", "v1")):
        with pytest.raises(RegistryError) as caught:
            action()
        assert caught.value.code == "unauthorized"
        assert f"docker login {fake.host}" in caught.value.hint
        text = "".join(traceback.format_exception(caught.value)) + caught.value.hint
        assert "wrong-secret" not in text
        assert base64.b64encode(b"alice:wrong-secret").decode() not in text
    assert "wrong-secret" not in caplog.text
    assert len(fake.seen) < 10  # no storm of tries


def test_secrets_are_in_no_log_and_no_error(fake, make_client, login, caplog):
    caplog.set_level(logging.DEBUG)
    fake.auth = "bearer"
    client = make_client(fake, credentials=login)
    push(client)
    fake.fail("GET", "manifests", faults.hang_up, times=99)
    with pytest.raises(RegistryError) as caught:
        client.get_manifest("a/b", "v1")
    text = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(login)
    for secret in secrets(fake):
        assert secret not in text


def test_identity_token(fake, make_client):
    fake.auth = "bearer"
    login = Credentials(auths={fake.host: Credential(identity_token=fake.refresh_token)})
    push(make_client(fake, credentials=login))
    assert fake.count("POST", "/token") == 1


def test_registry_token_is_sent_as_it_is(fake, make_client):
    fake.auth = "bearer"
    fake.tokens["given"] = {"repository:a/b:pull,push"}
    login = Credentials(auths={fake.host: Credential(registry_token="given")})
    push(make_client(fake, credentials=login))


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"token":""}', b'{"token":5}',
                                    b'{"token":"a b"}', b'{"token":"x\\ny"}'])  # fmt: skip
def test_junk_from_the_token_service(fake, make_client, login, answer):
    fake.auth = "bearer"
    fake.fail("GET", "/token", faults.body(answer))
    with pytest.raises(RegistryError) as caught:
        push(make_client(fake, credentials=login))
    assert caught.value.code == "token"


def test_token_service_that_fails_for_a_while(fake, make_client, login):
    fake.auth = "bearer"
    fake.fail("GET", "/token", faults.status(503), times=1)
    fake.fail("GET", "/token", faults.hang_up, times=1)
    push(make_client(fake, credentials=login))


@pytest.mark.parametrize("challenge", [
    "", "Negotiate", "Bearer", 'Bearer realm=""', 'Bearer realm="ftp://h/t"',
    'Bearer realm="http://[x"', 'Digest realm="a"',
])  # fmt: skip
def test_challenge_that_makes_no_sense(fake, make_client, login, challenge):
    fake.fail("*", "v2", faults.status(401, WWW_Authenticate=challenge), times=99)
    with pytest.raises(RegistryError) as caught:
        push(make_client(fake, credentials=login))
    assert caught.value.code in {"unauthorized", "token"}


# -- other hosts


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_redirect_to_another_host_carries_no_credentials(fake, make_client, login, code, auth):
    fake.auth = auth
    with FakeRegistry() as storage:
        storage.add_blob("a/b", DATA)
        target = f"{storage.url}/v2/a/b/blobs/{BLOB.digest}?signature=presigned"
        client = make_client(fake, credentials=login)
        if auth == "bearer":
            client.has_blob("a/b", BLOB)  # so that a token is known already
        fake.fail("GET", "blobs", faults.status(code, Location=target), times=9)
        assert pull(client) == DATA
        assert storage.seen
        assert all("Authorization" not in seen.headers for seen in storage.seen)


def test_netrc_is_never_used(fake, make_client, tmp_path, monkeypatch):
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login alice password netrc-secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HOME", str(tmp_path))
    with FakeRegistry() as storage:
        storage.add_blob("a/b", DATA)
        target = f"{storage.url}/v2/a/b/blobs/{BLOB.digest}"
        fake.fail("GET", "blobs", faults.status(307, Location=target))
        assert pull(make_client(fake)) == DATA
        assert all("Authorization" not in s.headers for s in (*fake.seen, *storage.seen))


def test_userinfo_in_a_redirect_is_not_sent_as_a_login(fake, client):
    with FakeRegistry() as storage:
        storage.add_blob("a/b", DATA)
        target = f"http://eve:pw@{storage.host}/v2/a/b/blobs/{BLOB.digest}"
        fake.fail("GET", "blobs", faults.status(307, Location=target))
        assert pull(client) == DATA
        assert all("Authorization" not in seen.headers for seen in storage.seen)


def test_upload_location_on_another_host_gets_no_credentials(fake, make_client, login):
    fake.auth = "basic"
    with FakeRegistry() as storage:
        storage.uploads["n0"] = bytearray()
        storage.states["n0"] = "s"
        target = f"{storage.url}/v2/a/b/blobs/uploads/n0?_state=s"
        client = make_client(fake, credentials=login)
        fake.fail("POST", "uploads", faults.status(202, Location=target), times=9)
        push(client)
        assert storage.blobs["a/b", BLOB.digest] == DATA
        assert all("Authorization" not in seen.headers for seen in storage.seen)


def test_redirects_in_a_circle(fake, client):
    fake.fail("GET", "blobs", faults.status(307, Location="/v2/a/b/blobs/x"), times=99)
    with pytest.raises(RegistryError) as caught:
        pull(client)
    assert caught.value.code == "too-many-redirects"


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "http://[bad", "file:///etc/passwd"])
def test_redirect_to_nowhere(fake, client, target):
    fake.fail("GET", "blobs", faults.status(307, Location=target), times=99)
    with pytest.raises(RegistryError) as caught:
        pull(client)
    assert caught.value.code in {"bad-address", "insecure-redirect"}


def test_redirect_of_a_write_is_not_followed(fake, client):
    fake.fail("PUT", "manifests", faults.status(307, Location="/v2/a/b/manifests/v1"), times=99)
    with pytest.raises(RegistryError) as caught:
        client.put_manifest("a/b", "v1", MANIFEST, MANIFEST_TYPE)
    assert caught.value.code == "rejected"


# -- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    path.write_bytes(
        built.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.fixture
def secure(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with FakeRegistry(tls=context) as registry:
        yield registry


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_own_certificate_authority(secure, certificate, variable):
    secure.auth = "bearer"
    pair = f"{secure.user}:{secure.password}"
    directory = certificate.parent
    config = {"auths": {secure.host: {"auth": base64.b64encode(pair.encode()).decode()}}}
    (directory / "config.json").write_text(json.dumps(config))
    environment = {variable: str(certificate), "DOCKER_CONFIG": str(directory)}
    with connect(secure.host, environment, plain_http=False) as client:
        push(client)
        assert pull(client) == DATA


def test_certificate_that_is_not_trusted(secure, make_client):
    with pytest.raises(RegistryError) as caught:
        pull(make_client(secure, plain_http=False))
    assert caught.value.code == "tls"
    assert "SSL_CERT_FILE" in caught.value.hint


def test_registry_without_tls_where_tls_is_expected(fake, make_client):
    with pytest.raises(RegistryError) as caught:
        pull(make_client(fake, plain_http=False))
    assert caught.value.code == "tls"


def test_redirect_from_https_to_http_is_refused(secure, fake, make_client, certificate):
    client = make_client(secure, plain_http=False, ca=str(certificate))
    fake.add_blob("a/b", DATA)
    target = f"{fake.url}/v2/a/b/blobs/{BLOB.digest}"
    secure.fail("GET", "blobs", faults.status(307, Location=target), times=9)
    with pytest.raises(RegistryError) as caught:
        pull(client)
    assert caught.value.code == "insecure-redirect"
    assert not fake.seen


def test_token_service_in_the_clear_gets_no_password(secure, make_client, certificate, login):
    secure.auth = "bearer"
    challenge = 'Bearer realm="http://tokens.example.com/t",service="x"'
    secure.fail("*", "v2", faults.status(401, WWW_Authenticate=challenge), times=9)
    credentials = Credentials(auths={secure.host: Credential(username="a", password="b")})
    client = make_client(secure, plain_http=False, ca=str(certificate), credentials=credentials)
    with pytest.raises(RegistryError) as caught:
        pull(client)
    assert caught.value.code == "token"


def test_which_ca_bundle():
    assert ca_bundle({}) is None
    assert ca_bundle({"SSL_CERT_FILE": "/b"}) == "/b"
    assert ca_bundle({"SSL_CERT_FILE": "/b", "REQUESTS_CA_BUNDLE": "/a"}) == "/a"


def test_client_that_is_closed(fake, make_client):
    client = make_client(fake)
    client.close()
    with pytest.raises(RegistryError):
        client.tags("a/b")


def test_malformed_docker_config_is_a_usage_error(tmp_path):
    (tmp_path / "config.json").write_text('{"auths": {"h": {"auth": "secret-junk"}}}')
    with pytest.raises(UsageError) as caught:
        load_credentials({"DOCKER_CONFIG": str(tmp_path)})
    assert "secret-junk" not in "".join(traceback.format_exception(caught.value))
