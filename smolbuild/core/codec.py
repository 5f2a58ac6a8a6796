"""One strict mapping between frozen dataclasses and JSON, so that formats are declared only once.

Names are ``snake_case`` in Python and ``camelCase`` in JSON. Decoding checks every type, refuses
unknown members and says where in the document something is wrong. A union of dataclasses is written
as an object with one member, whose name is the class (``{"httpProbe": {…}}``).
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeVar, cast

from smolbuild.core.errors import VerificationError

__all__ = ["decode", "encode"]

T = TypeVar("T")


def encode(value: object) -> Any:
    """Return ``value`` (dataclasses, tuples, mappings, scalars) as plain JSON data.

    Unions of dataclasses must be fields of a dataclass: their annotation says that a tag is needed.

    Raises:
        TypeError: a value of a type that has no JSON form.

    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        return {
            _camel(field.name): _encode_as(getattr(value, field.name), hints[field.name])
            for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def decode(kind: type[T], value: object, what: str) -> T:
    """Return the JSON data ``value`` as an instance of the dataclass ``kind``.

    Members with a default may be missing; unknown members are errors.

    Raises:
        VerificationError: something does not fit; names the place below ``what``.

    """
    return cast("T", _decode(kind, value, what))


def _encode_as(value: object, hint: object) -> Any:
    tagged = _tagged(hint)
    if value is not None and len(tagged) > 1:
        name = type(value).__name__
        return {_camel(name[0].lower() + name[1:]): encode(value)}
    return encode(value)


def _decode(hint: object, value: object, what: str) -> object:
    origin = typing.get_origin(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(hint, value, what)
    if origin is Literal:
        if value not in typing.get_args(hint) or isinstance(value, bool):
            _bad(what, f"expected one of {', '.join(map(repr, typing.get_args(hint)))}")
        return value
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), value, what)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, dict):
            _bad(what, "expected an object")
        item = typing.get_args(hint)[1]
        return {key: _decode(item, entry, f"{what}.{key}") for key, entry in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, what)
    supertype = getattr(hint, "__supertype__", None)  # a NewType such as Digest
    if supertype is not None:
        return _decode(supertype, value, what)
    return _decode_scalar(hint, value, what)


def _decode_scalar(hint: object, value: object, what: str) -> object:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(hint, type) or not isinstance(value, hint):
        _bad(what, f"expected {getattr(hint, '__name__', hint)}, got {type(value).__name__}")
    if isinstance(value, bool) and hint is not bool:
        _bad(what, f"expected {hint.__name__}, got bool")
    return value


def _decode_union(hint: object, value: object, what: str) -> object:
    if value is None and type(None) in typing.get_args(hint):
        return None
    tagged = _tagged(hint)
    if len(tagged) > 1:
        if not isinstance(value, dict) or len(value) != 1:
            _bad(what, "expected an object with one member")
        ((tag, content),) = value.items()
        for kind in tagged:
            if _camel(kind.__name__[0].lower() + kind.__name__[1:]) == tag:
                return _decode(kind, content, f"{what}.{tag}")
        _bad(what, f"unknown kind {tag[:60]!r}")
    others = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    for kind in others[:-1]:
        try:
            return _decode(kind, value, what)
        except VerificationError:
            continue
    return _decode(others[-1], value, what)


def _decode_tuple(items: tuple[object, ...], value: object, what: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        _bad(what, "expected a list")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(items[0], entry, f"{what}[{i}]") for i, entry in enumerate(value))
    if len(items) != len(value):
        _bad(what, f"expected {len(items)} entries, got {len(value)}")
    return tuple(
        _decode(item, entry, f"{what}[{i}]")
        for i, (item, entry) in enumerate(zip(items, value, strict=True))
    )


def _decode_dataclass(kind: type, value: object, what: str) -> object:
    if not isinstance(value, dict):
        _bad(what, "expected an object")
    hints = _hints(kind)
    names = {_camel(name): name for name in hints}
    for key in value:
        if key not in names:
            _bad(what, f"unknown member {key[:60]!r}")
    given = {}
    for field in dataclasses.fields(kind):
        key = _camel(field.name)
        if key in value:
            given[field.name] = _decode(hints[field.name], value[key], f"{what}.{key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            _bad(what, f"member {key!r} is missing")
    return kind(**given)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _tagged(hint: object) -> list[type]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return []
    return [
        kind
        for kind in typing.get_args(hint)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]


@functools.cache
def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _bad(what: str, problem: str) -> NoReturn:
    raise VerificationError(f"{what}: {problem}", code="malformed")
