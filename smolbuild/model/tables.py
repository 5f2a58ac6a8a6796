"""Typed reading of TOML tables by the declared keys; every problem is gathered."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TypeVar, cast

from smolbuild.core.errors import Problem
from smolbuild.core.values import dataclass
from smolbuild.model.durations import parse_duration, parse_size
from smolbuild.model.keys import Key, Kind, describe_type
from smolbuild.model.positions import join_key
from smolbuild.model.schema import SHAPES
from smolbuild.model.smolfile import Notice

__all__ = ["Report", "Table", "nearest", "show"]

T = TypeVar("T")

_SHOWN = 60
_LONGEST_KEY = 300
_FEW = 12
"""A table with no more keys than this has them listed when an unknown one is near none of them."""
_MANY = 100
"""After this many problems no near key is looked up any more: a hostile file has thousands."""


@dataclass(slots=True)
class Report:
    """Where problems and notices of one file go; two files of one Smolfile share the lists."""

    file: str
    positions: Mapping[str, int]
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    prefix: str = ""
    """What this file's keys are called inside the Smolfile: ``smolbuild.`` in a sibling file."""

    def line(self, key: str) -> int:
        """Return the line of ``key``, or of the nearest thing around it that has one."""
        place = key[:_LONGEST_KEY]
        while place and place not in self.positions:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return self.positions.get(place, 0)

    def problem(self, key: str, message: str, hint: str = "") -> None:
        """Note a problem with ``key``."""
        self.problems.append(
            Problem(
                file=self.file,
                line=self.line(key),
                key=_printable(key[:_LONGEST_KEY]),
                message=_printable(message),
                hint=_printable(hint),
            )
        )

    def notice(self, key: str, text: str, *, loud: bool = False, undeclared: bool = False) -> None:
        """Note something the user should know about ``key``."""
        self.notices.append(
            Notice(
                key=self.prefix + key,
                line=self.line(key),
                text=text,
                loud=loud,
                file=self.file,
                undeclared=undeclared,
            )
        )


class Table:
    """One table of a known shape. A value of the wrong type is a problem and reads as not given."""

    def __init__(self, report: Report, values: Mapping[str, object], path: str, shape: str) -> None:
        self.report = report
        self.path = path
        self._shape = SHAPES[shape]
        self._values = values
        for name in values:
            if name not in self._shape:
                report.problem(self.at(name), "unknown key", self._suggestion(name, shape))
        for name, key in self._shape.items():
            if key.required and name not in values:
                where = path or shape
                report.problem(where, f"{name} is missing", f"expected {describe_type(key)}")

    def at(self, name: str, index: int | None = None) -> str:
        """Return the dotted path of key ``name`` of this table."""
        path = join_key(self.path, name)
        return path if index is None else f"{path}[{index}]"

    def origin(self, name: str, index: int | None = None) -> str:
        """Return the path of key ``name`` as ``Smolfile.positions`` has it."""
        return self.report.prefix + self.at(name, index)

    def has(self, name: str) -> bool:
        """Return whether the key is there, whatever its value."""
        return name in self._values

    def problem(self, name: str, message: str, hint: str = "") -> None:
        """Note a problem with key ``name`` of this table."""
        self.report.problem(self.at(name), message, hint)

    def text(self, name: str) -> str | None:
        """Return a string, or None."""
        key, value = self._get(name, Kind.TEXT)
        return None if value is None else self._checked(key, value, self.at(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty when it is not there."""
        return tuple(text for text, _ in self.listed(name))

    def listed(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return a list of strings, each with the path it stands at; wrong ones are left out."""
        key, value = self._get(name, Kind.TEXTS)
        return self._checked_list(key, name, value)

    def integer(self, name: str) -> int | None:
        """Return a whole number within the key's limits, or None."""
        key, value = self._get(name, Kind.INTEGER)
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and key.low <= cast("int", value) <= key.high:
            return cast("int", value)
        self._wrong(key, name, value)
        return None

    def flag(self, name: str) -> bool | None:
        """Return true or false, or None."""
        key, value = self._get(name, Kind.FLAG)
        if value is None or isinstance(value, bool):
            return value
        self._wrong(key, name, value)
        return None

    def duration(self, name: str) -> float | None:
        """Return seconds, or None."""
        return self._measure(name, Kind.DURATION, parse_duration)

    def size(self, name: str) -> int | None:
        """Return bytes, or None."""
        return self._measure(name, Kind.SIZE, parse_size)

    def table(self, name: str) -> "Table | None":
        """Return a table, or None."""
        key, value = self._get(name, Kind.TABLE)
        return self._nested(key, value, self.at(name))

    def tables(self, name: str) -> "tuple[Table, ...]":
        """Return a list of tables; empty when it is not there."""
        key, value = self._get(name, Kind.TABLES)
        if value is None:
            return ()
        if not isinstance(value, list):
            self._wrong(key, name, value)
            return ()
        nested = (self._nested(key, item, self.at(name, i)) for i, item in enumerate(value))
        return tuple(table for table in nested if table is not None)

    def named_tables(self, name: str) -> "Mapping[str, Table]":
        """Return a table of tables by name; empty when it is not there."""
        key, value = self._get(name, Kind.TABLE_OF_TABLES)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._wrong(key, name, value)
            return {}
        path = self.at(name)
        nested = {
            entry: self._nested(key, item, join_key(path, entry)) for entry, item in value.items()
        }
        return {entry: table for entry, table in nested.items() if table is not None}

    def named_texts(self, name: str) -> Mapping[str, str]:
        """Return a table of strings by name; empty when it is not there."""
        key, value = self._get(name, Kind.TABLE_OF_TEXTS)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._wrong(key, name, value)
            return {}
        found = {}
        for entry, item in value.items():
            path = join_key(self.at(name), entry)
            text = self._checked_item(key, item, path)
            if not re.fullmatch(key.names, entry):
                self.report.problem(path, f"expected a name, got {show(entry)}")
            elif text is not None:
                found[entry] = text
        return found

    def flag_or_listed(self, name: str) -> bool | tuple[tuple[str, str], ...] | None:
        """Return true, false or a list of strings, each with its path, or None."""
        key, value = self._get(name, Kind.FLAG_OR_TEXTS)
        if value is None or isinstance(value, bool):
            return value
        return self._checked_list(key, name, value)

    def text_or_table(self, name: str) -> "str | Table | None":
        """Return a string or a table, or None."""
        key, value = self._get(name, Kind.TEXT_OR_TABLE)
        if value is None:
            return None
        if isinstance(value, dict):
            return self._nested(key, value, self.at(name))
        return self._checked(key, value, self.at(name))

    def _get(self, name: str, kind: Kind) -> tuple[Key, object]:
        key = self._shape[name]
        if key.kind is not kind:
            raise TypeError(f"{name} is declared as {key.kind}, read as {kind}")
        return key, self._values.get(name)

    def _checked(self, key: Key, value: object, path: str) -> str | None:
        if not isinstance(value, str):
            self.report.problem(path, f"expected {describe_type(key)}, got {show(value)}")
        elif "\0" in value:
            self.report.problem(path, "expected text without NUL characters")
        elif key.choices:
            known = value.lower() if key.any_case else value
            if known in key.choices:
                return known
            expected = f"expected {describe_type(key)}, got {show(value)}"
            self.report.problem(path, expected, nearest(known, key.choices))
        elif not re.fullmatch(key.pattern, value):
            expected = key.expected or key.kind.value
            self.report.problem(path, f"expected {expected}, got {show(value)}")
        else:
            return value
        return None

    def _checked_list(self, key: Key, name: str, value: object) -> tuple[tuple[str, str], ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            hint = f"write {name} = [{show(value)}]" if isinstance(value, str) else ""
            self._wrong(key, name, value, hint)
            return ()
        paths = (self.at(name, index) for index in range(len(value)))
        checked = (
            (self._checked_item(key, *pair), pair[1]) for pair in zip(value, paths, strict=True)
        )
        return tuple((text, path) for text, path in checked if text is not None)

    def _checked_item(self, key: Key, value: object, path: str) -> str | None:
        if not isinstance(value, str):
            self.report.problem(path, f"expected a string, got {show(value)}")
            return None
        return self._checked(key, value, path)

    def _measure(self, name: str, kind: Kind, parse: Callable[[str | int], T]) -> T | None:
        _, value = self._get(name, kind)
        if value is None:
            return None
        try:
            # What is neither text nor number is shown to the parser as junk, for its own message.
            plain = isinstance(value, str | int) and not isinstance(value, bool)
            return parse(cast("str | int", value) if plain else "")
        except ValueError as error:
            self.problem(name, f"{error}, got {show(value)}")
            return None

    def _nested(self, key: Key, value: object, path: str) -> "Table | None":
        if value is None:
            return None
        if not isinstance(value, dict):
            self.report.problem(path, f"expected a table, got {show(value)}")
            return None
        return Table(self.report, value, path, key.shape)

    def _wrong(self, key: Key, name: str, value: object, hint: str = "") -> None:
        self.problem(name, f"expected {describe_type(key)}, got {show(value)}", hint)

    def _suggestion(self, name: str, shape: str) -> str:
        if len(self.report.problems) > _MANY:
            return ""
        near = nearest(name, tuple(self._shape))
        if not near and shape == "root" and name in SHAPES["smolbuild"]:
            return "this key belongs into [smolbuild]"
        if not near and len(self._shape) <= _FEW:
            return f"known here: {', '.join(self._shape)}"
        return near


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``did you mean …?`` for the nearest of ``known``, or nothing when none is near."""
    import difflib

    found = difflib.get_close_matches(name[:_SHOWN], known, n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else ""


def show(value: object) -> str:
    """Return a short, safe description of a TOML value for a message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:_SHOWN]}…"' if len(value) > _SHOWN else f'"{value}"'
    if isinstance(value, int) and abs(value) < 2**63:
        return str(value)
    names = {int: "a number beyond 64 bits", list: "a list", dict: "a table", float: "a fraction"}
    return names.get(type(value), "a date or time")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text)
