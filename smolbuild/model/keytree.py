"""Key trees as values: their JSON form, and what changed between two of them."""

from collections.abc import Iterator, Mapping
from typing import NoReturn, cast

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, digest_value, hex_of, parse_digest
from smolbuild.core.errors import VerificationError
from smolbuild.core.values import dataclass

__all__ = ["Change", "KeyTree", "Leaf", "diff_trees", "leaf", "tree_from_json"]

_LEAF_DOMAIN = "smolbuild.key.leaf.v1"
_TREE_FORMAT = 1
_LONG = 40
_BARE = ("machine", "run", "contract")
"""Leaves whose fields need no leaf name before them in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A named input's value and its digest."""

    value: Json
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTree:
    """Leaves by name, in the order in which they enter the key."""

    leaves: Mapping[str, Leaf]

    def to_json(self) -> dict[str, Json]:
        """Return the tree as JSON data; ``tree_from_json`` of it gives an equal tree."""
        return {
            "format": _TREE_FORMAT,
            "leaves": [
                {"name": name, "value": item.value, "digest": item.digest}
                for name, item in self.leaves.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two trees. ``old`` or ``new`` is None where there was nothing."""

    leaf: str
    field: str
    """Inside the leaf; empty when the whole leaf changed, came or went."""
    old: Json
    new: Json
    text: str

    def __str__(self) -> str:
        """Return the difference as one readable line."""
        return self.text


def leaf(value: Json) -> Leaf:
    """Return the leaf of ``value``."""
    return Leaf(value=value, digest=digest_value(_LEAF_DOMAIN, value))


def tree_from_json(value: object) -> KeyTree:
    """Parse what ``KeyTree.to_json`` gave, checking every leaf's digest.

    Raises:
        VerificationError: another format, malformed, or a leaf whose digest is not its value's.

    """
    if not isinstance(value, dict) or set(value) != {"format", "leaves"}:
        _bad("expected the members format and leaves")
    if value["format"] != _TREE_FORMAT or isinstance(value["format"], bool):
        _bad(f"its format is not {_TREE_FORMAT}")
    if not isinstance(value["leaves"], list):
        _bad("leaves is not a list")
    leaves: dict[str, Leaf] = {}
    for item in value["leaves"]:
        name, parsed = _leaf_from_json(item)
        if name in leaves:
            _bad(f"two leaves are named {name[:60]!r}")
        leaves[name] = parsed
    return KeyTree(leaves=leaves)


def diff_trees(old: KeyTree, new: KeyTree) -> tuple[Change, ...]:
    """Return every difference from ``old`` to ``new``; none exactly when their keys are equal."""
    changes = list(_changes(old, new))
    moved = any(
        change.leaf.startswith("file ") and not change.field and None in (change.old, change.new)
        for change in changes
    )
    if moved:  # the paths that came or went say it better than a digest of all paths
        rest = [change for change in changes if change.field != "files"]
        return tuple(rest)
    return tuple(changes)


def _changes(old: KeyTree, new: KeyTree) -> Iterator[Change]:
    names = list(dict.fromkeys([*new.leaves, *old.leaves]))
    for name in names:
        before, after = old.leaves.get(name), new.leaves.get(name)
        if before is None and after is not None:
            yield _change(name, "", None, after.value, f"{name}: added")
        elif after is None and before is not None:
            yield _change(name, "", before.value, None, f"{name}: removed")
        elif before and after and before.digest != after.digest:
            yield from _inside(name, before.value, after.value)
    shared = [name for name in old.leaves if name in new.leaves]
    order = [name for name in new.leaves if name in old.leaves]
    if shared != order:
        was = [name for name in shared if name.startswith("step ")]
        now = [name for name in order if name.startswith("step ")]
        text = f"order: {', '.join(was)} -> {', '.join(now)}" if was != now else "order changed"
        yield _change("order", "", list(shared), list(order), text)


def _inside(name: str, old: Json, new: Json) -> Iterator[Change]:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        yield _change(name, "", old, new, f"{name}: {_arrow(old, new)}")
        return
    for field in dict.fromkeys([*new, *old]):
        before, after = old.get(field), new.get(field)
        if before != after or (field in old) != (field in new):
            prefix = "" if name in _BARE else f"{name}: "
            colon = ":" if name in _BARE else ""
            text = f"{prefix}{field}{colon} {_arrow(before, after)}"
            yield _change(name, field, before, after, text)


def _arrow(old: Json, new: Json) -> str:
    before, after = _shown(old), _shown(new)
    return "changed" if before is None or after is None else f"{before} -> {after}"


def _shown(value: Json) -> str | None:
    """Return ``value`` as a short word, or None when it is too long for one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if value.startswith("sha256:"):
            return "sha256:" + hex_of(Digest(value))[:12]
        return value if len(value) <= _LONG and value.isprintable() and value else None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return None
    parts = [_shown(item) for item in value]
    if any(part is None for part in parts):
        return None
    text = "[" + ", ".join(cast("list[str]", parts)) + "]"
    return text if len(text) <= 2 * _LONG else None


def _change(name: str, field: str, old: Json, new: Json, text: str) -> Change:
    return Change(leaf=name, field=field, old=old, new=new, text=text)


def _leaf_from_json(item: object) -> tuple[str, Leaf]:
    if not isinstance(item, dict) or set(item) != {"name", "value", "digest"}:
        _bad("a leaf does not have exactly name, value and digest")
    name = item["name"]
    if not isinstance(name, str) or not isinstance(item["digest"], str):
        _bad("a leaf's name or digest is not a string")
    try:
        digest = parse_digest(item["digest"])
        parsed = leaf(item["value"])
    except (ValueError, TypeError, RecursionError) as error:
        raise VerificationError(
            f"key tree: leaf {name[:60]!r}: {error}", code="malformed"
        ) from error
    if parsed.digest != digest:
        _bad(f"the digest of leaf {name[:60]!r} is not that of its value")
    return name, parsed


def _bad(problem: str) -> NoReturn:
    raise VerificationError(f"key tree: {problem}", code="malformed")
