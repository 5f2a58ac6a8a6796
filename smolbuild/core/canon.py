"""Canonical JSON in the style of RFC 8785, for values that need no number formatting rules."""

import json
from collections.abc import Mapping, Sequence
from typing import cast

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
        return _ENCODE(checked).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string is not valid Unicode: {error}") from error


_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def _checked(value: Json) -> object:
    # A project has ten thousand leaves of a few small values: exact types first, they are cheap.
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is dict:
        return _checked_object(cast("Mapping[str, Json]", value))
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) > _MAX_SAFE_INTEGER:
            raise ValueError(f"integer {value} is outside the range that JSON readers agree on")
        return value
    if isinstance(value, Mapping):
        return _checked_object(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_checked(item) for item in value]
    raise TypeError(f"canonical JSON cannot hold {type(value).__name__}")


def _checked_object(value: Mapping[str, Json]) -> dict[str, object]:
    try:
        plain = all(map(str.isascii, value))
    except TypeError as error:
        raise TypeError("canonical JSON needs string keys") from error
    keys = sorted(value) if plain else sorted(value, key=_utf16)
    return {key: _checked(value[key]) for key in keys}


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")
