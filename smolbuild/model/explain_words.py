"""The words for one changed value of a key tree."""

from collections.abc import Iterator, Mapping
from typing import cast

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.text import counted

__all__ = ["Words", "arrow", "differences", "environment", "probe_words", "shown"]

_LONG = 60
_DIFF_LINES = 40
_SETS = frozenset(
    ("allowHosts", "allowHostPatterns", "allowCidrs", "secrets", "inputs", "regenerate")
)
"""Lists whose order does not count: what came and what went says all."""
_SCRIPTS = ("run",)
_PROBES = ("probe", "ready")
_TELLING = ("TOKEN", "SECRET", "PASS", "KEY", "CREDENTIAL", "AUTH")
"""Of variables with such names a log need not show the value."""
_NAMES = {
    "engineVersion": "engine version",
    "machineType": "machine type",
    "cpuModel": "cpu model",
    "allowHosts": "allow_hosts",
    "allowHostPatterns": "allow_host_patterns",
    "allowCidrs": "allow_cidrs",
    "intervalMs": "interval",
    "timeoutMs": "timeout",
    "startupGraceMs": "startup_grace",
}

Words = tuple[str, Json, Json, str, tuple[str, ...]]
"""Field, old value, new value, what to say, and more lines."""


def differences(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Words]:
    """Yield the words for each field that differs between two values of one leaf."""
    for field in dict.fromkeys([*new, *old]):
        before, after = old.get(field), new.get(field)
        if before == after and (field in old) == (field in new):
            continue
        name = _NAMES.get(field, field)
        if field == "env":
            yield from _environment(_mapping(before), _mapping(after))
        elif field in _SETS:
            yield field, before, after, f"{name} {_came_and_went(before, after)}", ()
        elif field in _SCRIPTS and isinstance(before, str) and isinstance(after, str):
            said, details = _script(before, after)
            yield field, before, after, f"{name} {said}", details
        elif field in _PROBES:
            yield field, before, after, f"{name} {probe_words(before)} -> {probe_words(after)}", ()
        elif field.endswith("Ms"):
            yield field, before, after, f"{name} {before} ms -> {after} ms", ()
        else:
            yield field, before, after, f"{name} {arrow(before, after)}", ()


def environment(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Words]:
    """Yield the words for each variable that differs; the field is its name."""
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if name not in old:
            said = f"env {name}: added"
        elif name not in new:
            said = f"env {name}: removed"
        elif before == after:
            continue
        elif any(part in name.upper() for part in _TELLING):
            said = f"env {name}: changed"
        else:
            said = f"env {name}: {arrow(before, after)}"
        yield name, before, after, said, ()


def _environment(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Words]:
    for name, before, after, said, details in environment(old, new):
        yield f"env.{name}", before, after, said, details


def arrow(old: Json, new: Json) -> str:
    """Return ``old -> new``, or ``changed`` when one of them is too long for a line."""
    before, after = shown(old), shown(new)
    if before is None or after is None:
        return "changed"
    if before.startswith("sha256:"):
        after = after.removeprefix("sha256:")
    return f"{before} -> {after}"


def shown(value: Json) -> str | None:
    """Return ``value`` as a short word, or None when it is too long for one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if value.startswith("sha256:"):
            return f"sha256:{hex_of(Digest(value))[:12]}\N{HORIZONTAL ELLIPSIS}"
        if not value:
            return '""'
        return value if len(value) <= _LONG and value.isprintable() else None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return None
    parts = [shown(item) for item in value]
    if any(part is None for part in parts):
        return None
    text = "[" + ", ".join(cast("list[str]", parts)) + "]"
    return text if len(text) <= _LONG else None


def probe_words(value: Json) -> str:
    """Return what a probe asks, in a few words."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return "none"
    ((kind, inner),) = value.items()
    if not isinstance(inner, Mapping):
        return f"{kind} {shown(inner) or '(long)'}"
    where = f"{inner.get('host')}:{inner.get('port')}"
    if kind != "http":
        return f"{kind} {where}"
    text = f"http {where}{inner.get('path')}, status {inner.get('status')}"
    return f"{text}, contains {inner['contains']!r}" if inner.get("contains") else text


def _came_and_went(old: Json, new: Json) -> str:
    before, after = _texts(old), _texts(new)
    words = [f"+ {text}" for text in after if text not in before]
    words += [f"- {text}" for text in before if text not in after]
    return ", ".join(words) if words else "changed"


def _script(old: str, new: str) -> tuple[str, tuple[str, ...]]:
    before, after = old.splitlines(), new.splitlines()
    short = [shown(text.strip("\n")) for text in (old, new)]
    if len(before) <= 1 and len(after) <= 1 and None not in short:
        return f'"{short[0]}" -> "{short[1]}"', ()
    import difflib

    diff = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    added = sum(line.startswith("+") for line in diff)
    removed = sum(line.startswith("-") for line in diff)
    lines = [line if line.startswith("@@") else f"{line[0]} {line[1:]}" for line in diff]
    more = len(lines) - _DIFF_LINES
    if more > 0:
        lines[_DIFF_LINES:] = [f"({counted(more, 'more line')})"]
    return f"changed ({counted(added, 'line')} added, {removed} removed)", tuple(lines)


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Json) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list | tuple) else []
