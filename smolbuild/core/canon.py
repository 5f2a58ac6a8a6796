"""Canonical JSON in the style of RFC 8785, for values that need no number formatting rules."""

import json
from collections.abc import Mapping, Sequence

__all__ = ["Json", "canonical_json"]

Json = None | bool | int | str | Sequence["Json"] | Mapping[str, "Json"]
"""A JSON value without floats: what may enter a hash."""

_MAX_SAFE_INTEGER = 2**53 - 1


def canonical_json(value: Json) -> bytes:
    """Return the one canonical UTF-8 encoding of ``value``.

    Keys are sorted by their UTF-16 code units as RFC 8785 demands, no white space is written,
    strings are UTF-8 with only the mandatory escapes. Floats are refused: they have no place in
    an input.

    Raises:
        TypeError: the value holds a float, bytes, a non-string key or another foreign type.
        ValueError: an integer is outside ±(2^53-1), or a string holds a lone surrogate.

    """
    checked = _checked(value)
    try:
        return json.dumps(
            checked, ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string is not valid Unicode: {error}") from error


def _checked(value: Json) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) > _MAX_SAFE_INTEGER:
            raise ValueError(f"integer {value} is outside the range that JSON readers agree on")
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("canonical JSON needs string keys")
        return {key: _checked(value[key]) for key in sorted(value, key=_utf16)}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_checked(item) for item in value]
    raise TypeError(f"canonical JSON cannot hold {type(value).__name__}")


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")
