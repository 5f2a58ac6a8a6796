"""A Smolfile to start from, as a value, and its commented text.

What is written is read back with the project's own parser before anybody sees it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from smolbuild.core.errors import SmolfileError, UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.parse import parse_text
from smolbuild.model.toml_text import TomlValue, toml_value

__all__ = ["Block", "Draft", "draft_text"]

_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A table of the Smolfile with the comment above it; keys in the order they are written."""

    values: Mapping[str, TomlValue]
    comment: str = ""
    off: bool = False
    """Written as a comment: something only the user can fill in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a Smolfile is written from. Texts are paragraphs; they are wrapped as comments."""

    header: str
    top: tuple[Block, ...] = ()
    """Keys of the top level, in groups."""
    network: Block | None = None
    name: str
    copies: Block | None = None
    """``copy`` of ``[smolbuild]``."""
    base: Block | None = None
    steps: tuple[Block, ...] = ()
    services: tuple[Block, ...] = ()
    health: Block | None = None
    left_out: tuple[str, ...] = field(default=())
    """What could not be translated, a line each."""


def draft_text(draft: Draft) -> str:
    """Return the text of the Smolfile.

    Raises:
        UsageError: what was translated is not valid in a Smolfile; names each place.

    """
    text = "\n".join(_lines(draft)) + "\n"
    try:
        parse_text(text, file="Smolfile", environment={})
    except SmolfileError as error:
        raise UsageError(
            "the translation is not a valid Smolfile",
            hint="write the Smolfile by hand, with `Smolfile.example` beside it",
            code="not-translatable",
            details="\n".join(str(problem) for problem in error.problems),
        ) from error
    return text


def _lines(draft: Draft) -> Iterator[str]:
    yield from _comment(draft.header)
    for block in draft.top:
        yield ""
        yield from _block(block, "")
    if draft.network is not None:
        yield ""
        yield from _block(draft.network, "[network]")
    yield ""
    yield "[smolbuild]"
    yield f"name = {toml_value(draft.name)}"
    if draft.copies is not None:
        yield from _block(draft.copies, "")
    if draft.base is not None:
        yield ""
        yield from _block(draft.base, "[smolbuild.base]")
    for step in draft.steps:
        yield ""
        yield from _block(step, "[[smolbuild.step]]")
    for service in draft.services:
        yield ""
        yield from _block(service, "[[smolbuild.service]]")
    if draft.health is not None:
        yield ""
        yield from _block(draft.health, "[smolbuild.health]")
    if draft.left_out:
        yield ""
        yield "# Not translated:"
        for line in draft.left_out:
            yield from _comment(f"- {line}")


def _block(block: Block, heading: str) -> Iterator[str]:
    yield from _comment(block.comment)
    rows = [heading] if heading else []
    for key, value in block.values.items():
        rows.extend(f"{key} = {_value(value)}".split("\n"))
    if block.off:
        yield from (f"#{row}".rstrip() for row in rows)
    else:
        yield from rows


def _value(value: TomlValue) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        tables = [item for item in value if isinstance(item, Mapping)]
        if tables and len(tables) == len(value):
            return "[\n" + "".join(f"  {toml_value(item)},\n" for item in tables) + "]"
    return toml_value(value)


def _comment(text: str) -> Iterator[str]:
    import textwrap

    for paragraph in text.splitlines():
        shown = "".join(char if char.isprintable() else " " for char in paragraph)
        rows = textwrap.wrap(shown, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        yield from (f"# {row}" for row in rows or [""])
