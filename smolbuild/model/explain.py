"""Why a key differs from another one: every changed leaf, from what to what.

Pure: both key trees travel with their artifacts, and so does what a person wants to read beside a
digest (packages, versions).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest
from smolbuild.core.values import dataclass
from smolbuild.model.artifact import BaseInfo
from smolbuild.model.explain_reach import Reach
from smolbuild.model.explain_words import (
    Words,
    arrow,
    differences,
    environment,
    probe_words,
    shown,
)
from smolbuild.model.keytree import Change, KeyTree, Leaf
from smolbuild.model.packages import compare_packages, package_counts

__all__ = ["LineWords", "Side", "explain", "no_lines"]

LineWords = Callable[[str, Digest, Digest], str]
"""Says which lines of a file (path, old and new digest) differ; empty where that is not known."""

_BARE = ("machine", "run", "contract")
"""Leaves whose fields need no leaf name before them in a sentence."""
_LISTED = ("step", "service", "copy", "file")
"""Leaves of which there are several; a name follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The key tree of one build, and what is known of the inputs behind its digests."""

    tree: KeyTree
    base: BaseInfo | None = None
    kernel: str = ""
    """Version of the kernel package; empty: the user's own kernel, or not known."""
    builder: str = ""
    """Version of smolbuild; empty: not known."""


def no_lines(path: str, old: Digest, new: Digest) -> str:
    """Say nothing about lines."""
    del path, old, new
    return ""


def explain(old: Side, new: Side, *, lines: LineWords = no_lines) -> tuple[Change, ...]:
    """Return every difference from ``old`` to ``new``; none exactly when their keys are equal."""
    before, after = old.tree.leaves, new.tree.leaves
    if [(n, i.digest) for n, i in before.items()] == [(n, i.digest) for n, i in after.items()]:
        return ()
    found = [
        *_single_leaves(old, new),
        *_copies(_family(before, "copy"), _family(after, "copy")),
        *_named("step", _family(before, "step"), _family(after, "step")),
        *_named("service", _family(before, "service"), _family(after, "service")),
        *_files(_family(before, "file"), _family(after, "file"), lines),
    ]
    reach = Reach(old.tree, new.tree)
    found = [replace(change, first=reach.first(change)) for change in found]
    said = [change for change in found if not reach.is_said_elsewhere(change, found)]
    if said or found:
        return tuple(said or found)
    order = [list(before), list(after)]
    return (_change("order", "", order[0], order[1], "the order of the inputs changed"),)


def _family(leaves: Mapping[str, Leaf], kind: str) -> dict[str, Leaf]:
    return {name: item for name, item in leaves.items() if name.startswith(f"{kind} ")}


def _single_leaves(old: Side, new: Side) -> Iterator[Change]:
    before, after = old.tree.leaves, new.tree.leaves
    for name in dict.fromkeys([*after, *before]):
        if name.partition(" ")[0] in _LISTED:
            continue
        was, now = before.get(name), after.get(name)
        if was is None or now is None or was.digest == now.digest:
            if was is not now and (was is None or now is None):
                yield _came_or_went(name, was, now)
            continue
        if name == "base":
            yield _base(old.base, new.base, was.value, now.value)
        elif name in {"kernel", "agent"}:
            yield _versioned(name, old, new, was.value, now.value)
        elif name == "env" and isinstance(was.value, Mapping) and isinstance(now.value, Mapping):
            for words in environment(was.value, now.value):
                yield _of_words(name, "", words)
        elif name == "health":
            yield from _health(was.value, now.value)
        else:
            yield from _inside(name, "" if name in _BARE else f"{name}: ", was.value, now.value)


def _base(was: BaseInfo | None, now: BaseInfo | None, old: Json, new: Json) -> Change:
    digests = arrow(old, new)
    if was is None or now is None:
        return _change("base", "", old, new, f"base: {digests}")
    if str(was) != str(now):
        return _change("base", "", old, new, f"base: {was} -> {now} ({digests})")
    packages = compare_packages(was.packages, now.packages)
    said = package_counts(packages)
    if not said:
        return _change("base", "", old, new, f"base {now}: {digests}")
    details = tuple(str(package) for package in packages)
    return _change("base", "", old, new, f"base {now}: {said}", details)


def _versioned(name: str, old: Side, new: Side, was: Json, now: Json) -> Change:
    before, after = (old.kernel, new.kernel) if name == "kernel" else (old.builder, new.builder)
    text = f"{name}: {arrow(was, now)}"
    if before and after and before != after:
        of = "" if name == "kernel" else " of smolbuild"
        text = f"{name}{of}: {before} -> {after}"
    return _change(name, "", was, now, text)


def _health(was: Json, now: Json) -> Iterator[Change]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        yield from _inside("health", "health: ", was, now)
        return
    value = now if isinstance(now, Mapping) else was
    probe = probe_words(value.get("probe")) if isinstance(value, Mapping) else "none"
    verb = "removed" if now is None else "added"
    yield _change("health", "", was, now, f"health: {verb} ({probe})")


def _named(kind: str, old: dict[str, Leaf], new: dict[str, Leaf]) -> Iterator[Change]:
    """Steps or services: what is new under another name only, and everything in the others."""
    renamed = _renames(old, new)
    for name, item in new.items():
        if name in old:
            was = old[name]
            if was.digest != item.digest:
                yield from _inside(name, f"{name}: ", was.value, item.value)
        elif name in renamed:
            before = renamed[name].removeprefix(f"{kind} ")
            after = name.removeprefix(f"{kind} ")
            text = f"{renamed[name]}: renamed to {after}"
            yield _change(name, "name", before, after, text)
        else:
            yield _came_or_went(name, None, item)
    for name, item in old.items():
        if name not in new and name not in renamed.values():
            yield _came_or_went(name, item, None)
    back = {was: now for now, was in renamed.items()}
    before_order = [back.get(name, name) for name in old if back.get(name, name) in new]
    after_order = [name for name in new if name in before_order]
    if before_order != after_order:
        text = f"order: {', '.join(before_order)} -> {', '.join(after_order)}"
        yield _change("order", kind, before_order, after_order, text)


def _renames(old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> dict[str, str]:
    """Return the old name by the new one of what is the same but for its name."""
    gone = {item.digest: name for name, item in old.items() if name not in new}
    return {
        name: gone.pop(item.digest)
        for name, item in new.items()
        if name not in old and item.digest in gone
    }


def _copies(old: dict[str, Leaf], new: dict[str, Leaf]) -> Iterator[Change]:
    before = [(name, _mapping(item.value)) for name, item in old.items()]
    after = [(name, _mapping(item.value)) for name, item in new.items()]
    for leaf, field, was, now, text in _copy_changes(before, after):
        yield _change(leaf, field, was, now, text)


def _copy_changes(
    old: list[tuple[str, Mapping[str, Json]]], new: list[tuple[str, Mapping[str, Json]]]
) -> Iterator[tuple[str, str, Json, Json, str]]:
    """Pair copies by where they come from and go to, since a new one moves all later numbers."""
    left = list(old)
    kept = []
    for name, value in new:
        pair = next((each for each in left if _ends(each[1]) == _ends(value)), None)
        if pair is None:
            yield name, "", None, value, f"copy {_ends_words(value)}: added"
            continue
        left.remove(pair)
        kept.append(pair)
        for words in differences(pair[1], value):
            text = words.line(f"copy {_ends_words(value)}: ")
            yield name, words.field, words.old, words.new, text
    for name, value in left:
        yield name, "", value, None, f"copy {_ends_words(value)}: removed"
    order = [pair for pair in old if pair in kept]
    if order != kept:
        was, now = ([_ends_words(value) for _, value in pairs] for pairs in (order, kept))
        yield (
            "order",
            "copy",
            was,
            now,
            f"order of the copies: {', '.join(was)} -> {', '.join(now)}",
        )


def _ends(copy: Mapping[str, Json]) -> tuple[Json, Json]:
    return copy.get("from"), copy.get("to")


def _ends_words(copy: Mapping[str, Json]) -> str:
    return f"{shown(copy.get('from'))} to {shown(copy.get('to'))}"


def _files(old: dict[str, Leaf], new: dict[str, Leaf], lines: LineWords) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        path = name.removeprefix("file ")
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            there = now or was
            kind = _mapping(there.value).get("kind") if there else None
            what = "" if kind == "file" else f"{kind} "
            verb = "removed" if now is None else "added"
            yield _change(name, "", _value(was), _value(now), f"{path}: {what}{verb}")
        elif was.digest != now.digest:
            yield from _file(name, path, _mapping(was.value), _mapping(now.value), lines)


def _file(
    leaf: str, path: str, old: Mapping[str, Json], new: Mapping[str, Json], lines: LineWords
) -> Iterator[Change]:
    if old.get("kind") != new.get("kind"):
        text = f"{path}: {old.get('kind')} -> {new.get('kind')}"
        yield _change(leaf, "kind", old.get("kind"), new.get("kind"), text)
        return
    for field in dict.fromkeys([*new, *old]):
        was, now = old.get(field), new.get(field)
        if was == now:
            continue
        if field == "executable":
            modes = [f"0{755 if value else 644}" for value in (was, now)]
            text = f"{path}: mode {modes[0]} -> {modes[1]}"
        else:
            text = f"{path}: {field} {arrow(was, now)}"
        if field == "content" and isinstance(was, str) and isinstance(now, str):
            where = lines(path, Digest(was), Digest(now))
            text += f" ({where})" if where else ""
        yield _change(leaf, field, was, now, text)


def _inside(name: str, prefix: str, old: Json, new: Json) -> Iterator[Change]:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        yield _change(name, "", old, new, f"{name}: {arrow(old, new)}")
        return
    before, after = dict(old), dict(new)
    copies = _pop_list(before, "copy"), _pop_list(after, "copy")
    networks = _mapping(before.pop("network", None)), _mapping(after.pop("network", None))
    for words in differences(before, after):
        yield _of_words(name, prefix, words)
    for words in differences(*networks):
        field = f"network.{words.field}"
        yield _of_words(name, f"{prefix}network ", replace(words, field=field))
    for number, field, was, now, said in _copy_changes(*copies):
        inner = f"copy.{number}.{field}".rstrip(".")
        yield _change(name, inner, was, now, f"{prefix}{said}")


def _pop_list(value: dict[str, Json], field: str) -> list[tuple[str, Mapping[str, Json]]]:
    """Take a list of objects out of ``value``, with their numbers from 1 on."""
    items = value.pop(field, None)
    listed = items if isinstance(items, list | tuple) else ()
    return [(str(number), _mapping(item)) for number, item in enumerate(listed, start=1)]


def _of_words(name: str, prefix: str, words: Words) -> Change:
    text = words.line(prefix)
    return _change(name, words.field, words.old, words.new, text, words.details)


def _came_or_went(name: str, was: Leaf | None, now: Leaf | None) -> Change:
    verb = "removed" if now is None else "added"
    return _change(name, "", _value(was), _value(now), f"{name}: {verb}")


def _change(
    name: str, field: str, old: Json, new: Json, text: str, details: tuple[str, ...] = ()
) -> Change:
    return Change(leaf=name, field=field, old=old, new=new, text=text, details=details)


def _value(item: Leaf | None) -> Json:
    return None if item is None else item.value


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}
