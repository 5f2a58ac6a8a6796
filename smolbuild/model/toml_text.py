"""TOML as text (toml.io, v1.0.0): strings, arrays, inline tables, as a person writes them."""

from collections.abc import Mapping, Sequence

__all__ = ["TomlValue", "toml_string", "toml_value"]

TomlValue = str | bool | int | Sequence["TomlValue"] | Mapping[str, "TomlValue"]

_ESCAPES = {chr(code): f"\\u{code:04x}" for code in (*range(32), 127)} | {'"': '\\"', "\\": "\\\\"}
_WIDTH = 100


def toml_string(text: str) -> str:
    """Return a basic string; everything that may not stand in one is escaped."""
    return '"' + "".join(_ESCAPES.get(char, char) for char in text) + '"'


def toml_value(value: TomlValue) -> str:
    """Return ``value`` as a person would write it: long lists and texts of lines over many lines.

    Keys of tables must be bare (letters, digits, ``_`` and ``-``).
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return _text(value)
        case Mapping():
            members = ", ".join(f"{key} = {_inline(item)}" for key, item in value.items())
            return f"{{ {members} }}" if members else "{}"
        case _:
            line = "[" + ", ".join(_inline(item) for item in value) + "]"
            if len(line) <= _WIDTH:
                return line
            return "[\n" + "".join(f"  {_inline(item)},\n" for item in value) + "]"


def _inline(value: TomlValue) -> str:
    """Return ``value`` on one line, as the inside of an inline table must be."""
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return toml_value(value)


def _text(text: str) -> str:
    plain = all(char in "\n\t" or (ord(char) >= 32 and char != "\x7f") for char in text)
    if "\n" in text and plain and "'''" not in text and not text.endswith("'"):
        return f"'''\n{text}'''"  # a line end right after the quotes is not part of the text
    if '"' in text and "'" not in text and plain and "\n" not in text:
        return f"'{text}'"
    return toml_string(text)
