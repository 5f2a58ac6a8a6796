"""One strict mapping between frozen dataclasses and JSON, so that formats are declared only once.

Names are ``snake_case`` in Python and ``camelCase`` in JSON. Decoding checks every type, refuses
unknown members and says where in the document something is wrong. A union of dataclasses is written
as an object with one member, whose name is the class (``{"httpProbe": {…}}``).
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from smolbuild.core.errors import VerificationError

__all__ = ["decode", "encode"]

T = TypeVar("T")
_Decoder = Callable[[object], object]


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
    try:
        decoder: _Decoder = _decoder(cast("Any", kind))
        return cast("T", decoder(value))
    except _MisfitError as misfit:
        place = what + "".join(reversed(misfit.path))
        raise VerificationError(f"{place}: {misfit.problem}", code="malformed") from None


def _encode_as(value: object, hint: object) -> Any:
    tagged = _tagged(hint)
    if value is not None and len(tagged) > 1:
        return {_tag(type(value)): encode(value)}
    return encode(value)


class _MisfitError(Exception):
    """A value that does not fit; every container on the way out adds its part of the path."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


@functools.cache
def _decoder(hint: Any) -> _Decoder:
    """Return the function that decodes values of ``hint``: an annotation is looked at once."""
    origin = typing.get_origin(hint)
    if hint is Any or hint is object:
        return lambda value: value
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(hint)
    if origin is Literal:
        return _literal_decoder(typing.get_args(hint))
    if origin is tuple:
        items = typing.get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis:
            return _list_decoder(items[0])
        return _tuple_decoder(items)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _mapping_decoder(typing.get_args(hint)[1])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_decoder(hint)
    supertype = getattr(hint, "__supertype__", None)  # a NewType such as Digest
    if supertype is not None:
        return _decoder(supertype)
    return _scalar_decoder(hint)


def _scalar_decoder(hint: object) -> _Decoder:
    name = getattr(hint, "__name__", str(hint))

    def scalar(value: object) -> object:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise _MisfitError(f"expected {name}, got {type(value).__name__}")

    return scalar


def _literal_decoder(allowed: tuple[object, ...]) -> _Decoder:
    def literal(value: object) -> object:
        if isinstance(value, bool) or value not in allowed:
            raise _MisfitError(f"expected one of {', '.join(map(repr, allowed))}")
        return value

    return literal


def _union_decoder(hint: object) -> _Decoder:
    tagged = _tagged(hint)
    others = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    optional = len(others) < len(typing.get_args(hint))
    if len(tagged) > 1:
        inner = _tagged_decoder(tagged)
    else:
        inner = _first_fit_decoder([_decoder(kind) for kind in others])
    if optional:
        return lambda value: None if value is None else inner(value)
    return inner


def _tagged_decoder(kinds: list[type]) -> _Decoder:
    by_tag = {_tag(kind): _decoder(kind) for kind in kinds}

    def tagged(value: object) -> object:
        if not isinstance(value, dict) or len(value) != 1:
            raise _MisfitError("expected an object with one member")
        ((tag, content),) = value.items()
        if tag not in by_tag:
            raise _MisfitError(f"unknown kind {tag[:60]!r}")
        try:
            return by_tag[tag](content)
        except _MisfitError as misfit:
            misfit.path.append(f".{tag}")
            raise

    return tagged


def _first_fit_decoder(decoders: list[_Decoder]) -> _Decoder:
    *first, last = decoders
    if not first:
        return last

    def first_fit(value: object) -> object:
        for decoder in first:
            try:
                return decoder(value)
            except _MisfitError:
                continue
        return last(value)

    return first_fit


def _list_decoder(item: object) -> _Decoder:
    decoder = _decoder(item)

    def items(value: object) -> object:
        if not isinstance(value, list):
            raise _MisfitError("expected a list")
        done: list[object] = []
        try:
            for entry in value:
                done.append(decoder(entry))  # noqa: PERF401 - how many are done says where
        except _MisfitError as misfit:
            misfit.path.append(f"[{len(done)}]")
            raise
        return tuple(done)

    return items


def _tuple_decoder(kinds: tuple[object, ...]) -> _Decoder:
    decoders = [_decoder(kind) for kind in kinds]

    def entries(value: object) -> object:
        if not isinstance(value, list):
            raise _MisfitError("expected a list")
        if len(value) != len(decoders):
            raise _MisfitError(f"expected {len(decoders)} entries, got {len(value)}")
        done: list[object] = []
        try:
            for decoder, entry in zip(decoders, value, strict=True):
                done.append(decoder(entry))
        except _MisfitError as misfit:
            misfit.path.append(f"[{len(done)}]")
            raise
        return tuple(done)

    return entries


def _mapping_decoder(item: object) -> _Decoder:
    decoder = _decoder(item)

    def mapping(value: object) -> object:
        if not isinstance(value, dict):
            raise _MisfitError("expected an object")
        done: dict[str, object] = {}
        for key, entry in value.items():
            try:
                done[key] = decoder(entry)
            except _MisfitError as misfit:
                misfit.path.append(f".{key}")
                raise
        return done

    return mapping


def _dataclass_decoder(kind: type) -> _Decoder:
    hints = _hints(kind)
    members = {_camel(name): (name, _decoder(hint)) for name, hint in hints.items()}
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def instance(value: object) -> object:
        if not isinstance(value, dict):
            raise _MisfitError("expected an object")
        given: dict[str, object] = {}
        for key, entry in value.items():
            if key not in members:
                raise _MisfitError(f"unknown member {key[:60]!r}")
            name, decoder = members[key]
            try:
                given[name] = decoder(entry)
            except _MisfitError as misfit:
                misfit.path.append(f".{key}")
                raise
        if not needed <= given.keys():
            missing = next(name for name in hints if name in needed and name not in given)
            raise _MisfitError(f"member {_camel(missing)!r} is missing")
        return kind(**given)

    return instance


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    if not any(isinstance(field.type, str) for field in fields):
        return {field.name: field.type for field in fields}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields}


def _tagged(hint: object) -> list[type]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return []
    return [
        kind
        for kind in typing.get_args(hint)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]


def _tag(kind: type) -> str:
    """Return the member that says which of a union's dataclasses an object is."""
    return _camel(kind.__name__[0].lower() + kind.__name__[1:])


@functools.cache
def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)
