"""Image and artifact references: grammar, Docker's short names, round trip."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError
from smolbuild.model.reference import (
    Reference,
    artifact_name,
    is_loopback,
    local_name,
    parse_reference,
)

DIGEST = Digest("sha256:" + "ab" * 32)


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("debian", "docker.io", "library/debian", "latest", None),
        ("debian:bookworm-slim", "docker.io", "library/debian", "bookworm-slim", None),
        ("acme/env:1", "docker.io", "acme/env", "1", None),
        ("docker.io/debian", "docker.io", "library/debian", "latest", None),
        ("index.docker.io/acme/env", "docker.io", "acme/env", "latest", None),
        ("localhost/x", "localhost", "x", "latest", None),
        ("localhost:5000/x", "localhost:5000", "x", "latest", None),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000", "a/b", "c", None),
        ("[::1]:5000/a/b:c", "[::1]:5000", "a/b", "c", None),
        ("registry.example.com/a__b/c-d--e.f:T_1.2", "registry.example.com", "a__b/c-d--e.f",
         "T_1.2", None),
        (f"host.example.com/x:1@{DIGEST}", "host.example.com", "x", "1", DIGEST),
        (f"x@{DIGEST}", "docker.io", "library/x", None, DIGEST),
        ("Upper/x", "Upper", "x", "latest", None),
    ],
)  # fmt: skip
def test_parses(text, registry, repository, tag, digest):
    reference = parse_reference(text)
    assert reference == Reference(registry=registry, repository=repository, tag=tag, digest=digest)
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing"),
        ("localhost:5000/", "missing"),
        ("Debian", "upper-case"),
        ("acme/Env", "upper-case"),
        ("x:", "tag after ':' is missing"),
        ("x:-bad", "not a tag"),
        ("x:" + "t" * 129, "not a tag"),
        ("x@sha256:abc", "not a sha256 digest"),
        ("x@", "not a sha256 digest"),
        ("x@md5:" + "0" * 64, "not a sha256 digest"),
        ("https://host.example.com/x", "no scheme"),
        ("host.example.com:99999/x", "not a registry host"),
        ("host.example.com:0/x", "not a registry host"),
        ("-host.example.com/x", "not a registry host"),
        ("[::zz]/x", "not a registry host"),
        ("[1:2]:5000/x", "not a registry host"),
        ("a//b", "not a name"),
        ("a/./b", "not a name"),
        ("a/../b", "not a name"),
        ("a___b", "not a name"),
        ("host.example.com/" + "a" * 250, "255"),
        ("a" * 1000, "too long"),
        ("x\n", "not a name"),
        ("x:t\n", "not a tag"),
        ("x y", "not a name"),
    ],
)
def test_refuses(text, says):
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert says in caught.value.message
    assert "example.com" in caught.value.hint
    assert caught.value.exit_status == 2


def test_digest_decides():
    reference = parse_reference(f"host.example.com/x:1@{DIGEST}")
    assert reference.locator == DIGEST
    assert reference.tagged("2").locator == "2"
    assert reference.tagged("2").at(DIGEST).digest == DIGEST
    assert reference.name == "host.example.com/x"


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:5", "127.9.9.9", "[::1]",
                                  "[::1]:5000", "a.localhost:3"])  # fmt: skip
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["docker.io", "10.0.0.1:5000", "[2001:db8::1]:443",
                                  "localhost.example.com", "127.0.0.1.example.com"])  # fmt: skip
def test_not_loopback(host):
    assert not is_loopback(host)


_component = st.from_regex(r"[a-z0-9]{1,8}((\.|_|__|-{1,3})[a-z0-9]{1,8}){0,2}", fullmatch=True)
_host = st.from_regex(r"[a-z0-9]{1,8}(\.[a-z0-9]{1,8}){1,2}(:[1-9][0-9]{0,3})?", fullmatch=True)


@given(
    registry=_host,
    repository=st.lists(_component, min_size=1, max_size=4).map("/".join),
    tag=st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", fullmatch=True),
    digest=st.none() | st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True),
)
def test_round_trip(registry, repository, tag, digest):
    if tag is None and digest is None:
        tag = "latest"
    reference = Reference(registry=registry, repository=repository, tag=tag, digest=digest)
    assert parse_reference(str(reference)) == reference


@given(st.text(max_size=80) | st.text("abAB019:/@.-_[]", max_size=40))
def test_any_text_is_a_reference_or_a_usage_error(text):
    try:
        reference = parse_reference(text)
    except UsageError:
        return
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("notes", "notes:latest"),
        ("notes:v1", "notes:v1"),
        ("acme/agent-env:2026.1", "acme/agent-env:2026.1"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("registry.example.com/team/x:V1", "registry.example.com/team/x:V1"),
    ],
)
def test_names_of_the_local_store(text, name):
    assert local_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", ":v", "a:", "a:b:c", "a b", "a\nb", "a\x1b[31m", "-x", "Ünï", "a/", "/a", "A/b c"),
        "x@sha256:" + "0" * 64,
        "a" * 300,
        "a:" + "t" * 129,
    ],
)
def test_what_is_no_name_is_said_without_commanding_the_terminal(text):
    with pytest.raises(UsageError) as caught:
        local_name(text)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("notes-service", "notes-service"),
        ("My Project ü", "my-project"),
        ("…", "machine"),
        ("", "machine"),
        ("x" * 400, "x" * 255),
    ],
)
def test_a_directory_gives_a_valid_name(directory, name):
    assert artifact_name(directory) == name
    assert local_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "https://robot:hunter2@registry.example.com/x",
        "robot:hunter2@registry.example.com/x:1",
        "registry.example.com/robot:hunter2@x",
        "a:b:hunter2@sha256@x",
    ],
)
def test_a_password_in_a_reference_is_not_repeated(text):
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert "hunter2" not in caught.value.message + caught.value.hint
