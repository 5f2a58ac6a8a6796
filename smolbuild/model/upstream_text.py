"""The part of a Smolfile that smolvm reads: its text without the table ``[smolbuild]``."""

import re
import tomllib
from collections.abc import Mapping

from smolbuild.core.errors import UsageError
from smolbuild.model.positions import scan_positions

__all__ = ["upstream_text"]

_ASIDE = re.compile(r"\s*(#.*)?")


def upstream_text(text: str, *, file: str) -> str:
    """Return ``text`` without the key ``smolbuild`` and all below it, comments and all else kept.

    Comments and blank lines directly above a removed table go with it. Idempotent.

    Raises:
        UsageError: the text is not TOML, or is written in a way that lines cannot be taken out of.

    """
    try:
        values = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not valid TOML: {error}", code="smolfile") from error
    if "smolbuild" not in values:
        return text
    result = "".join(_theirs(text.splitlines(keepends=True), _starts(text)))
    del values["smolbuild"]
    try:
        same = tomllib.loads(result) == values
    except ValueError:
        same = False
    if not same:
        raise UsageError(
            f"{file}: [smolbuild] cannot be taken out of it line by line",
            hint="give [smolbuild] lines of its own, or move it into a smolbuild.toml",
            code="smolfile",
        )
    return result


def _starts(text: str) -> dict[int, bool]:
    """Return the lines at which keys begin, and whether only keys of ours do."""
    starts: dict[int, bool] = {}
    for key, number in scan_positions(text).items():
        ours = key == "smolbuild" or key.startswith(("smolbuild.", "smolbuild["))
        starts[number] = starts.get(number, True) and ours
    return starts


def _theirs(lines: list[str], starts: Mapping[int, bool]) -> list[str]:
    kept: list[str] = []
    ours = False
    for number, line in enumerate(lines, 1):
        now = starts.get(number, ours)
        if ours and not now:
            kept.extend(_head(lines, number))
        elif now and not ours:
            kept = _without_tail(kept)
        ours = now
        if not ours:
            kept.append(line)
    return kept


def _head(lines: list[str], number: int) -> list[str]:
    """Return the comments directly above line ``number``: they are about what comes there."""
    first = number - 1
    while first and _ASIDE.fullmatch(lines[first - 1].rstrip("\r\n")):
        first -= 1
    return lines[first : number - 1]


def _without_tail(kept: list[str]) -> list[str]:
    last = len(kept)
    while last and _ASIDE.fullmatch(kept[last - 1].rstrip("\r\n")):
        last -= 1
    return kept[:last]
