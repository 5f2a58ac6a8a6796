"""Parser, JSON Schema and Smolfile.example agree, in both directions."""

import copy
import datetime as dt
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import SmolfileError
from smolbuild.model.keys import Key, Kind
from smolbuild.model.parse import parse_text
from smolbuild.model.positions import join_key
from smolbuild.model.schema import SHAPES, encode_schema

ROOT = Path(__file__).parents[3]
EXAMPLE = (ROOT / "Smolfile.example").read_text()
SCHEMA = json.loads((ROOT / "schemas/smolfile.v1.json").read_bytes())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
SWITCHED_OFF = re.compile(r"^#(?=[a-z\[A-Z])", re.MULTILINE)
EVERYTHING = SWITCHED_OFF.sub("", EXAMPLE)

CONFLICTS = (
    "image and [smolbuild.base] are both there",
    "[health] is there too",
    "two names of one table",
    "expected one of port, http, file and exec",
    "needs cuda",
    "debian and dockerfile are both there",
    "it means nothing beside debian",
)
"""What is wrong with the example when the alternatives are switched on all at once."""


OPEN_TABLES = {"secrets", "smolbuild.secrets", "smolbuild.base.args"}
"""Tables whose names are free."""


def problems(text: str) -> tuple[str, ...]:
    try:
        parse_text(text, file="Smolfile", environment={})
    except SmolfileError as error:
        return tuple(map(str, error.problems))
    return ()


def used_keys(values: object, shape: str) -> Iterator[tuple[str, str]]:
    """Yield ``(shape, key)`` of everything in a document, following the declared shapes."""
    assert isinstance(values, dict)
    for name, value in values.items():
        key = SHAPES[shape][name]
        yield shape, name
        for inner in nested(key, value):
            yield from used_keys(inner, key.shape)


def nested(key: Key, value: object) -> list[object]:
    if key.kind is Kind.TABLES:
        assert isinstance(value, list)
        return value
    if key.kind is Kind.TABLE_OF_TABLES:
        assert isinstance(value, dict)
        return list(value.values())
    return [value] if key.shape and isinstance(value, dict) else []


def test_the_schema_file_is_what_the_declarations_give() -> None:
    assert (ROOT / "schemas/smolfile.v1.json").read_bytes() == encode_schema(), (
        "write smolbuild.model.schema.encode_schema() to schemas/smolfile.v1.json"
    )


def test_the_schema_is_a_schema_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    objects = {"root": SCHEMA, **SCHEMA["$defs"]}
    assert set(objects) == set(SHAPES)
    for name, shape in SHAPES.items():
        assert set(objects[name]["properties"]) == set(shape)
        assert objects[name]["additionalProperties"] is False
        for key in objects[name]["properties"].values():
            assert key["description"].endswith(".")


def test_the_example_parses_and_fits_the_schema() -> None:
    assert problems(EXAMPLE) == ()
    VALIDATOR.validate(tomllib.loads(EXAMPLE))


def test_the_example_shows_every_key_and_no_other() -> None:
    everything = {(shape, name) for shape, keys in SHAPES.items() for name in keys}
    document = tomllib.loads(EVERYTHING)
    document["pack"], document["fork"] = document["artifact"], document["branch"]
    assert set(used_keys(document, "root")) == everything
    for name in ("pack", "fork"):
        assert f"[{name}]" in EXAMPLE


def test_what_the_example_switches_off_is_right_too() -> None:
    VALIDATOR.validate(tomllib.loads(EVERYTHING))
    for problem in problems(EVERYTHING):
        assert any(conflict in problem for conflict in CONFLICTS), problem


def leaves(values: object, path: str = "") -> Iterator[tuple[str, list[str | int]]]:
    """Yield the dotted path and the steps to every value of a document."""
    items = enumerate(values) if isinstance(values, list) else values.items()  # type: ignore[attr-defined]
    for name, value in items:
        here = f"{path}[{name}]" if isinstance(name, int) else join_key(path, name)
        yield here, [name]
        if isinstance(value, dict | list):
            for inner, steps in leaves(value, here):
                yield inner, [name, *steps]


def replaced(document: object, steps: list[str | int], value: object) -> object:
    result = copy.deepcopy(document)
    place = result
    for step in steps[:-1]:
        place = place[step]  # type: ignore[index]
    place[steps[-1]] = value  # type: ignore[index]
    return result


DOCUMENT = tomllib.loads(EVERYTHING)
LEAVES = list(leaves(DOCUMENT))


def toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{join_key('', k)} = {toml(v)}" for k, v in value.items()) + "}"
    return str(value)


def as_text(document: object) -> str:
    assert isinstance(document, dict)
    return "\n".join(f"{join_key('', key)} = {toml(value)}" for key, value in document.items())


@pytest.mark.parametrize(("path", "steps"), LEAVES, ids=[path for path, _ in LEAVES])
def test_the_parser_reads_every_key(path: str, steps: list[str | int]) -> None:
    """No key takes a date: each one that is not looked at would let it pass."""
    found = problems(as_text(replaced(DOCUMENT, steps, dt.date(2024, 1, 1))))
    assert any(f" {path}: " in problem and "expected" in problem for problem in found), found


VALUES: st.SearchStrategy[object] = st.one_of(
    st.sampled_from(
        [
            0,
            1,
            -1,
            63,
            64,
            80,
            255,
            256,
            65535,
            65536,
            2**32,
            True,
            False,
            [],
            {},
            [1],
            [""],
            "",
            "x",
            "/x",
            "./x",
            "../x",
            "5s",
            "500ms",
            "1.5s",
            "5 m",
            "20GiB",
            "A=1",
            "8080:80",
            "1-2",
            "always",
            "Always",
            "on-failure",
            "memory",
            "warn",
            "tsi",
            "http://127.0.0.1:1/",
            "a b",
            "0644",
            "0999",
            "root:root",
            "1000:1000",
            "bookworm",
            "linux/amd64",
            "./a:/b:ro",
            ["x"],
            ["A=1", "B"],
            ["8080"],
            ["machine-id"],
            ["../x"],
            {"port": 1},
            {"x": 1},
            {"from": "a", "to": "/b"},
            [{"from": "a", "to": "/b"}],
            [{"run": "x"}],
            "postgresql",
        ]
    ),
    st.text(max_size=6).filter(lambda text: text.isprintable()),
)


@given(st.sampled_from(LEAVES), VALUES)
@settings(max_examples=500, deadline=None)
def test_what_the_schema_rejects_the_parser_rejects(
    leaf: tuple[str, list[str | int]], value: object
) -> None:
    document = replaced(DOCUMENT, leaf[1], value)
    found = [text for text in problems(as_text(document)) if not any(c in text for c in CONFLICTS)]
    errors = list(VALIDATOR.iter_errors(document))
    assert found or not errors, (leaf, value, errors[0].message)


@given(st.sampled_from(LEAVES), st.sampled_from(["unheard_of", "Image", "a b"]))
@settings(max_examples=100, deadline=None)
def test_no_table_takes_an_unknown_key(leaf: tuple[str, list[str | int]], name: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    place: object = document
    for step in leaf[1]:
        place = place[step]  # type: ignore[index]
    if not isinstance(place, dict) or leaf[0] in OPEN_TABLES:
        return
    place[name] = 1
    assert any("unknown key" in problem for problem in problems(as_text(document)))
    assert list(VALIDATOR.iter_errors(document))
