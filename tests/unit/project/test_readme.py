"""What the README shows is what the code does."""

import re
from pathlib import Path

import pytest

from smolbuild.cli.main import _COMMANDS
from smolbuild.core import errors
from smolbuild.core.errors import SmolfileError
from smolbuild.model.parse import parse_text

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> str:
    """Give the one fenced block of the README in ``language``."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    found = [text for named, text in blocks if named == language]
    assert len(found) == 1, f"the README has {len(found)} blocks of {language!r}"
    return found[0]


def test_the_tutorials_smolfile_parses_without_a_notice():
    smolfile = parse_text(fenced("toml"), file="Smolfile")
    assert smolfile.notices == ()
    assert [service.name for service in smolfile.services] == ["web"]


def test_the_tutorials_mistakes_give_the_errors_it_shows():
    text = fenced("toml")
    for right, wrong in (("memory = ", "memroy = "), ('"500ms"', '"half a second"')):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    with pytest.raises(SmolfileError) as caught:
        parse_text(text, file="Smolfile")
    assert [f"error: {problem}" for problem in caught.value.problems] == fenced("").splitlines()


def test_every_command_is_listed():
    table = README.partition("## Commands")[2].partition("`--json`")[0]
    listed = set(re.findall(r"`(?:smolbuild )?([a-z]+)", table)) - {"smolbuild"}
    assert listed == set(_COMMANDS)


def test_every_exit_status_of_an_error_is_listed():
    table = README.partition("### Exit status")[2].partition("\n## ")[0]
    listed = {int(number) for number in re.findall(r"\b(\d+)(?=,| \||, )", table)}
    of_errors = {getattr(errors, name).exit_status for name in errors.__all__ if "Error" in name}
    assert listed == of_errors | {0, 130, 143}


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
)
def test_links_of_the_docs_lead_somewhere(page: str):
    check_links(ROOT / page)


@pytest.mark.parametrize(
    "page", ["README.md", "examples/notes-service/README.md", "examples/plain-smolvm/README.md"]
)
def test_links_of_the_readmes_lead_somewhere(page: str):
    check_links(ROOT / page)


def check_links(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page} links to {missing}"
