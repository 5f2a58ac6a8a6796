"""The words for one changed value of a key tree."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.text import counted
from smolbuild.core.values import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One changed field: its values, and what a person reads of it."""

    field: str
    old: Json
    new: Json
    name: str
    said: str
    details: tuple[str, ...] = ()
    colon: bool = False
    """Whether the name is always followed by a colon, also behind the name of a leaf."""

    def line(self, prefix: str = "") -> str:
        """Return the words as a line; a field behind no prefix gets a colon."""
        colon = ":" if self.colon or not prefix else ""
        return f"{prefix}{self.name}{colon} {self.said}"


def differences(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Words]:
    """Yield the words for each field that differs between two values of one leaf."""
    for field in dict.fromkeys([*new, *old]):
        before, after = old.get(field), new.get(field)
        if before == after and (field in old) == (field in new):
            continue
        if field == "env":
            for words in environment(_mapping(before), _mapping(after)):
                yield replace(words, field=f"env.{words.field}")
            continue
        details: tuple[str, ...] = ()
        if field in _SETS:
            said = _came_and_went(before, after)
        elif field in _SCRIPTS and isinstance(before, str) and isinstance(after, str):
            said, details = _script(before, after)
        elif field in _PROBES:
            said = f"{probe_words(before)} -> {probe_words(after)}"
        elif field == "files":
            said = "are other paths"
        elif field.endswith("Ms"):
            said = f"{before} ms -> {after} ms"
        else:
            said = arrow(before, after)
        name = _NAMES.get(field, field)
        yield Words(field=field, old=before, new=after, name=name, said=said, details=details)


def environment(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[Words]:
    """Yield the words for each variable that differs; the field is its name."""
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if name not in old:
            said = "added"
        elif name not in new:
            said = "removed"
        elif before == after:
            continue
        elif any(part in name.upper() for part in _TELLING):
            said = "changed"
        else:
            said = arrow(before, after)
        yield Words(field=name, old=before, new=after, name=f"env {name}", said=said, colon=True)


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
