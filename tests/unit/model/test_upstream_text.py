"""A Smolfile without our table: the rest as it was written."""

import tomllib
from pathlib import Path

import pytest

from smolbuild.core.errors import UsageError
from smolbuild.model.upstream_text import upstream_text

ROOT = Path(__file__).parents[3]

TEXT = """\
# The machine.
image = "x"  # base
init = ['''
[smolbuild] is only text here
''']

# Ours.
[smolbuild]
name = "a/b"

[[smolbuild.step]]
run = "x"
# about the network
[network]
allow_hosts = [
  "a",
]
"""


def test_tables_of_ours_go_with_their_comments() -> None:
    assert upstream_text(TEXT, file="Smolfile") == (
        TEXT[: TEXT.index("\n# Ours.")] + TEXT[TEXT.index("# about the network") :]
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        'image = "x"\n',
        'smolbuild.name = "x"\nimage = "y"\n[network]\n',
        'image = "y"\nsmolbuild = { name = "x", step = [{ run = "y" }] }\ncpus = 1\n',
        '[smolbuild.base]\ndebian = "bookworm"\n',
        'image = "x"\r\n[smolbuild]\r\nname = "y"\r\n',
        '["smolbuild"]\nname = "y"\n[dev]\ninit = ["a"]\n["smolbuild".cache]\nmax_size = "1GiB"\n',
    ],
)
def test_what_stays_is_all_else(text: str) -> None:
    wanted = {key: value for key, value in tomllib.loads(text).items() if key != "smolbuild"}
    result = upstream_text(text, file="Smolfile")
    assert tomllib.loads(result) == wanted
    assert upstream_text(result, file="Smolfile") == result


def test_the_example_without_ours() -> None:
    text = (ROOT / "Smolfile.example").read_text()
    result = upstream_text(text, file="x")
    assert "smolbuild" not in tomllib.loads(result)
    assert result.startswith(text[:200])


@pytest.mark.parametrize("text", ["a = ", "smolbuild = { }, x = 1", "\0"])
def test_what_is_not_toml(text: str) -> None:
    with pytest.raises(UsageError, match="not valid TOML"):
        upstream_text(text, file="Smolfile")
