"""Docker's config.json and credential helpers."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.errors import RegistryError, UsageError
from smolbuild.registry.credentials import Credential, Credentials, load_credentials


def auth(username, password):
    return base64.b64encode(f"{username}:{password}".encode()).decode()


def load(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return load_credentials({"DOCKER_CONFIG": str(directory), "HOME": "/nonexistent"})


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """Install a credential helper that notes what it was asked for."""

    def install(name, script):
        path = tmp_path / f"docker-credential-{name}"
        path.write_text(
            f'#!/bin/sh\nserver=$(cat); echo "$1 $server" >> {tmp_path}/asked\n{script}'
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "asked"

    return install


def test_no_file_means_no_logins(tmp_path):
    assert load_credentials({}) == Credentials()
    assert load_credentials({"HOME": str(tmp_path)}) == Credentials()
    assert load_credentials({"DOCKER_CONFIG": str(tmp_path)}).lookup("h") is None


def test_home_and_docker_config(tmp_path):
    (tmp_path / ".docker").mkdir()
    at_home = {"auths": {"h.example.com": {"auth": auth("home", "pw")}}}
    (tmp_path / ".docker" / "config.json").write_text(json.dumps(at_home))
    found = load_credentials({"HOME": str(tmp_path)}).lookup("h.example.com")
    assert found == Credential(username="home", password="pw")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps({"auths": {"h.example.com": {"auth": auth("other", "p:w")}}})
    )
    environment = {"HOME": str(tmp_path), "DOCKER_CONFIG": str(other)}
    found = load_credentials(environment).lookup("h.example.com")
    assert found == Credential(username="other", password="p:w")


@pytest.mark.parametrize("key", ["h", "https://h", "https://h/v1/", "http://h/v2/"])
def test_keys_with_scheme_and_path(tmp_path, key):
    assert load(tmp_path, {"auths": {key: {"auth": auth("a", "b")}}}).lookup("h")


@pytest.mark.parametrize("key", ["h.example.com.evil.example.com", "h.example.com:444",
                                 "evil/h.example.com", "h.example.com/team"])  # fmt: skip
def test_login_of_another_host_is_not_used(tmp_path, key):
    found = load(tmp_path, {"auths": {key: {"auth": auth("a", "b")}}}).lookup("h.example.com")
    assert found is None


def test_docker_hub_key(tmp_path):
    config = {"auths": {"https://index.docker.io/v1/": {"auth": auth("a", "b")}}}
    assert load(tmp_path, config).lookup("docker.io") == Credential(username="a", password="b")


def test_tokens_and_plain_fields(tmp_path):
    config = {
        "auths": {
            "i": {"auth": auth("00000000", ""), "identitytoken": "it"},
            "r": {"registrytoken": "rt"},
            "p": {"username": "u", "password": "w"},
            "empty": {},
        }
    }
    logins = load(tmp_path, config)
    assert logins.lookup("i").identity_token == "it"
    assert logins.lookup("r").registry_token == "rt"
    assert logins.lookup("p") == Credential(username="u", password="w")
    assert logins.lookup("empty") is None
    for secret in ("it", "rt", "w"):
        assert f"'{secret}'" not in repr(logins)


def test_helper_for_one_host(tmp_path, helper):
    asked = helper("one", """echo '{"ServerURL":"x","Username":"u","Secret":"s"}'""")
    logins = load(tmp_path, {"auths": {"h": {}}, "credHelpers": {"h": "one"}})
    assert not asked.exists()  # asked only when a registry wants a login
    assert logins.lookup("h") == Credential(username="u", password="s")
    assert logins.lookup("other") is None
    assert asked.read_text() == "get h\n"


def test_store_for_every_host(tmp_path, helper):
    asked = helper("all", """echo '{"Username":"<token>","Secret":"refresh"}'""")
    logins = load(tmp_path, {"credsStore": "all"})
    assert logins.lookup("docker.io") == Credential(identity_token="refresh")
    assert asked.read_text() == "get https://index.docker.io/v1/\n"


def test_store_that_knows_nothing(tmp_path, helper):
    helper("all", 'echo "credentials not found in native keychain"; exit 1')
    config = {"credsStore": "all", "auths": {"h": {"auth": auth("a", "b")}}}
    assert load(tmp_path, config).lookup("h") == Credential(username="a", password="b")
    assert load(tmp_path, config).lookup("i") is None


@pytest.mark.parametrize(
    "script",
    [
        "echo locked >&2; exit 2",
        "echo junk-secret",
        "echo '{}'",
        """echo '{"Username":1,"Secret":2}'""",
    ],
)
def test_helper_that_fails(tmp_path, helper, script):
    helper("bad", script)
    with pytest.raises(RegistryError) as caught:
        load(tmp_path, {"credsStore": "bad"}).lookup("h")
    assert caught.value.code == "credential-helper"
    assert "junk-secret" not in caught.value.message


def test_helper_that_is_missing(tmp_path):
    with pytest.raises(RegistryError) as caught:
        load(tmp_path, {"credsStore": "no-such-helper"}).lookup("h")
    assert caught.value.code == "credential-helper"


@pytest.mark.parametrize("name", ["../evil", "a/b", "", " ", "-x", "a\nb"])
def test_helper_names_cannot_be_paths(tmp_path, name):
    with pytest.raises(UsageError):
        load(tmp_path, {"credHelpers": {"h": name}})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["auths", "h", "auth", "credHelpers", "credsStore", "identitytoken"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(st.binary(max_size=60) | _json.map(lambda v: json.dumps(v).encode()))
def test_any_file_is_logins_or_a_usage_error(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_bytes(data)
    try:
        logins = load_credentials({"DOCKER_CONFIG": str(directory)})
    except UsageError as error:
        said = error.message
    else:
        said = str(directory)
        if not logins.store and not logins.helpers:
            logins.lookup("h")
    assert str(directory) in said
