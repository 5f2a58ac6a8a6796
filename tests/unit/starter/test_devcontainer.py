"""devcontainer.json: comments and all, and every part that has a counterpart."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import UsageError
from smolbuild.model.parse import parse_text
from smolbuild.model.smolfile import Dockerfile
from smolbuild.starter.devcontainer import translate_devcontainer
from smolbuild.starter.draft import draft_text
from smolbuild.starter.jsonc import parse_jsonc

WHOLE = """\
// A container
{
  "name": "x", /* a
  comment of lines */
  "image": "registry.example.com/dev:1",
  "features": {"ghcr.example.com/node:1": {}},
  "forwardPorts": [8000, "db:5432", "x"],
  "containerEnv": {"MODE": "dev", "WHERE": "${containerWorkspaceFolder}/x"},
  "remoteEnv": {"FROM_HOST": "${localEnv:SECRET:none}",},
  "remoteUser": "dev",
  "workspaceFolder": "/work",
  "onCreateCommand": "pip install -r requirements.txt // not a comment",
  "updateContentCommand": ["make", "a b"],
  "postCreateCommand": {"one": "echo 1", "two": ["echo", "2"]},
  "mounts": [],
}
"""


def translate(text: str, root: Path = Path("/p")):
    file = root / ".devcontainer" / "devcontainer.json"
    draft = translate_devcontainer(text, file=file, root=root, name="acme/x")
    return draft, draft_text(draft)


def test_a_whole_file():
    draft, text = translate(WHOLE)
    smolfile = parse_text(text, file="Smolfile", environment={})
    assert smolfile.image == "registry.example.com/dev:1"
    assert dict(smolfile.env) == {"MODE": "dev", "WHERE": "/work/x", "FROM_HOST": "none"}
    assert (smolfile.workdir, smolfile.user) == ("/work", "dev")
    assert smolfile.ports == ((8000, 8000), (5432, 5432))
    assert [(step.name, step.run, step.user) for step in smolfile.steps] == [
        ("onCreateCommand", "pip install -r requirements.txt // not a comment", "dev"),
        ("updateContentCommand", "make 'a b'", "dev"),
        ("postCreateCommand-one", "echo 1", "dev"),
        ("postCreateCommand-two", "echo 2", "dev"),
    ]
    (copy,) = smolfile.copy
    assert (copy.source, copy.to, copy.owner) == (".", "/work", "dev")
    left = "\n".join(draft.left_out)
    for what in ("features", "mounts", "localEnv:SECRET", "'x' is not a port"):
        assert what in left


def test_a_dockerfile_is_found_from_where_the_file_stands():
    build = {"dockerfile": "Dockerfile", "context": "..", "target": "dev", "args": {"V": "1"}}
    draft = translate_devcontainer(
        json.dumps({"build": {**build, "cacheFrom": "x"}}),
        file=Path("/p/.devcontainer/devcontainer.json"),
        root=Path("/p"),
        name="x",
    )
    assert draft.base is not None
    assert draft.base.values == {
        "dockerfile": ".devcontainer/Dockerfile",
        "target": "dev",
        "args": {"V": "1"},
    }
    assert any("cacheFrom" in line for line in draft.left_out)
    base = parse_text(draft_text(draft), file="Smolfile", environment={}).base
    assert base == Dockerfile(
        dockerfile=".devcontainer/Dockerfile", target="dev", args=(("V", "1"),)
    )


@pytest.mark.parametrize(
    "text",
    ["{}", '{"dockerComposeFile": "x"}', "[]", "{", '{"image": "x" "y"}', "[" * 100_000, "/"],
)
def test_what_names_no_machine_is_an_error(text):
    with pytest.raises(UsageError):
        translate(text)


@pytest.mark.parametrize("text", ['{"a": %s}' % ("9" * 5000), '{"a": %s' % ("[" * 200_000)])
def test_jsonc_that_no_parser_takes_is_our_error(text):
    with pytest.raises(UsageError, match="f"):
        parse_jsonc(text, file="f")


def test_jsonc_keeps_strings_and_lines():
    value = parse_jsonc('{"a": "// no, /* no */ ,]", "b": [1, 2, // x\n ], /* , */ }', file="f")
    assert value == {"a": "// no, /* no */ ,]", "b": [1, 2]}
    with pytest.raises(UsageError, match="f:4: not JSON"):
        parse_jsonc('{\n/* a\n b */\n"a" 1}', file="f")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
members = st.sampled_from(
    ["image", "build", "forwardPorts", "containerEnv", "remoteEnv", "remoteUser", "mounts",
     "workspaceFolder", "onCreateCommand", "updateContentCommand", "postCreateCommand", "x\ny"]
)  # fmt: skip


@given(values)
def test_plain_json_is_read_as_json(value):
    text = json.dumps({"value": value}, indent=1)
    assert parse_jsonc(text, file="f") == {"value": value}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([{"image": "x"}, {"build": {"dockerfile": "D", "args": {"A": "b"}}}]),
    st.dictionaries(members, values, max_size=6),
)
def test_any_file_gives_a_valid_smolfile_or_our_error(base, value):
    try:
        _, text = translate(json.dumps({**base, **value}))
    except UsageError:
        return
    smolfile = parse_text(text, file="Smolfile", environment={})
    assert smolfile.image or smolfile.base
