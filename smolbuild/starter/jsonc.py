"""JSON with comments and trailing commas, as devcontainer.json is written (jsonc.org)."""

import json
import re

from smolbuild.core.errors import UsageError

__all__ = ["parse_jsonc"]

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|,|[^",/]+|.', re.DOTALL)
_MAX_CHARACTERS = 1 << 20


def parse_jsonc(text: str, *, file: str) -> dict[str, object]:
    """Return the object that ``text`` holds.

    Raises:
        UsageError: it is not JSON even without comments and trailing commas, or not an object;
            names the line.

    """
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"{file} has more than {_MAX_CHARACTERS:,} characters", code="jsonc")
    try:
        value = json.loads(_plain(text.removeprefix("\ufeff")))
    except json.JSONDecodeError as error:
        raise UsageError(f"{file}:{error.lineno}: not JSON: {error.msg}", code="jsonc") from error
    except RecursionError as error:
        raise UsageError(f"{file}: nested too deeply", code="jsonc") from error
    except ValueError as error:
        raise UsageError(f"{file}: a number has too many digits", code="jsonc") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}: expected an object", code="jsonc")
    return value


def _plain(text: str) -> str:
    """Return ``text`` with comments and trailing commas blanked out, each line where it was."""
    kept: list[str] = []
    comma: int | None = None
    for piece in _TOKEN.findall(text):
        if piece.startswith(("//", "/*")):
            kept.append("\n" * piece.count("\n") or " ")
            continue
        if comma is not None and piece.lstrip()[:1] in ("}", "]"):
            kept[comma] = " "
        if piece.strip():
            comma = len(kept) if piece == "," else None
        kept.append(piece)
    return "".join(kept)
