"""The JSON Schema (2020-12) of a Smolfile, for editors, rendered from the key declarations.

``schemas/smolfile.v1.json`` is exactly ``encode_schema()``. A document that this schema rejects is
rejected by the parser too; the parser checks more (relations between keys, files, duplicates).
"""

import json
from collections.abc import Mapping

from smolbuild.core.canon import Json
from smolbuild.model.keys import Key, Kind, Shape, json_type
from smolbuild.model.keys_smolbuild import SMOLBUILD
from smolbuild.model.keys_upstream import UPSTREAM

__all__ = ["SCHEMA_ID", "SHAPES", "encode_schema"]

SCHEMA_ID = "https://smolbuild.example.com/schemas/smolfile.v1.json"
_DEFINITIONS = "#/$defs/"

_ROOT: Shape = {
    **UPSTREAM["root"],
    "smolbuild": Key(
        kind=Kind.TABLE,
        about="What smolbuild adds. May stand in a sibling smolbuild.toml instead, without prefix.",
        shape="smolbuild",
    ),
}
SHAPES: Mapping[str, Shape] = {**UPSTREAM, **SMOLBUILD, "root": _ROOT}
"""Every table's keys, by the shape's name; ``root`` is the top level of a Smolfile."""


def encode_schema() -> bytes:
    """Return the schema file's bytes."""
    document: dict[str, Json] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Smolfile",
        "description": "A virtual machine, declared: smolvm's keys and smolbuild's own.",
        **_object(SHAPES["root"]),
        "$defs": {name: _object(SHAPES[name]) for name in sorted(SHAPES) if name != "root"},
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _object(shape: Shape) -> dict[str, Json]:
    required: dict[str, Json] = {"required": [name for name, key in shape.items() if key.required]}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(key) for name, key in shape.items()},
        **(required if required["required"] else {}),
    }


def _property(key: Key) -> dict[str, Json]:
    default: dict[str, Json] = {} if key.default is None else {"default": key.default}
    return {"description": key.about, **json_type(key, _DEFINITIONS), **default}
