"""What a Smolfile may hold: each key with its type, limits, default and meaning, declared once.

The parser reads by these declarations, the JSON Schema for editors is rendered from them, and the
nearest known key of a mistyped one is looked up in them.
"""

import enum
from collections.abc import Mapping

from smolbuild.core.canon import Json
from smolbuild.core.values import dataclass
from smolbuild.model.durations import DURATION_PATTERN, SIZE_PATTERN

__all__ = [
    "GUEST_PATH",
    "NAME",
    "TEXT",
    "USER",
    "Key",
    "Kind",
    "Shape",
    "describe_type",
]

TEXT = r"[^\x00]*"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?"
GUEST_PATH = r"/[^\x00]*"


class Kind(enum.Enum):
    """The type of a key's value."""

    TEXT = "a string"
    TEXTS = "a list of strings"
    INTEGER = "a whole number"
    FLAG = "true or false"
    DURATION = "a duration such as 500ms, 2s, 5m, 1h or 7d, or whole seconds"
    SIZE = "a size such as 20GiB, or a number of bytes"
    TABLE = "a table"
    TABLES = "a list of tables"
    TABLE_OF_TABLES = "a table of tables"
    TABLE_OF_TEXTS = "a table of strings"
    FLAG_OR_TEXTS = "true, false or a list of strings"
    TEXT_OR_TABLE = "a string or a table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. ``pattern`` is for the whole string, or for each string of a list."""

    kind: Kind
    about: str
    default: Json = None
    low: int = 0
    high: int = 2**63 - 1
    pattern: str = TEXT
    names: str = TEXT
    """Pattern of the names in a table of strings."""
    expected: str = ""
    """What ``pattern`` means, in words: the end of ``expected …``."""
    choices: tuple[str, ...] = ()
    any_case: bool = False
    shape: str = ""
    """The name of the table's shape, for the table kinds."""
    required: bool = False


Shape = Mapping[str, Key]
"""The keys of one table."""


def describe_type(key: Key) -> str:
    """Return what a value of ``key`` looks like, for ``expected …``."""
    if key.choices:
        return "one of " + ", ".join(f'"{choice}"' for choice in key.choices)
    if key.kind is Kind.INTEGER and key.high < 2**63 - 1:
        return f"a whole number from {key.low} to {key.high}"
    return key.kind.value


def json_type(key: Key, definitions: str) -> dict[str, Json]:
    """Return the JSON Schema of the value of ``key``; ``definitions`` leads to the shapes."""
    text: dict[str, Json] = {"type": "string", "pattern": f"^({key.pattern})$"}
    if key.choices and key.any_case:
        text = {"type": "string", "pattern": f"^({'|'.join(map(_any_case, key.choices))})$"}
    elif key.choices:
        text = {"enum": list(key.choices)}
    reference: dict[str, Json] = {"$ref": f"{definitions}{key.shape}"}
    texts: dict[str, Json] = {"type": "array", "items": text}
    counted: dict[str, Json] = {"type": "integer", "minimum": key.low, "maximum": key.high}
    types: dict[Kind, dict[str, Json]] = {
        Kind.TEXT: text,
        Kind.TEXTS: texts,
        Kind.INTEGER: counted,
        Kind.FLAG: {"type": "boolean"},
        Kind.DURATION: _number_or(DURATION_PATTERN),
        Kind.SIZE: _number_or(SIZE_PATTERN),
        Kind.TABLE: reference,
        Kind.TABLES: {"type": "array", "items": reference},
        Kind.TABLE_OF_TABLES: {"type": "object", "additionalProperties": reference},
        Kind.TABLE_OF_TEXTS: {
            "type": "object",
            "propertyNames": {"pattern": f"^({key.names})$"},
            "additionalProperties": text,
        },
        Kind.FLAG_OR_TEXTS: {"anyOf": [{"type": "boolean"}, texts]},
        Kind.TEXT_OR_TABLE: {"anyOf": [text, reference]},
    }
    return types[key.kind]


def _number_or(pattern: str) -> dict[str, Json]:
    return {
        "anyOf": [
            {"type": "string", "pattern": f"^{pattern}$"},
            {"type": "integer", "minimum": 0},
        ]
    }


def _any_case(word: str) -> str:
    """Return a pattern for ``word`` in any case; JSON Schema's dialect has no flag for that."""
    return "".join(
        f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else letter for letter in word
    )
