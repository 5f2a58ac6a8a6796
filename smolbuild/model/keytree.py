"""Key trees as values, and their JSON form; ``model.explain`` says how two of them differ."""

from collections.abc import Mapping
from typing import NoReturn

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, digest_value, parse_digest
from smolbuild.core.errors import VerificationError
from smolbuild.core.values import dataclass

__all__ = ["Change", "KeyTree", "Leaf", "leaf", "tree_from_json"]

_LEAF_DOMAIN = "smolbuild.key.leaf.v1"
_TREE_FORMAT = 1


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
    """The difference as one readable line."""
    details: tuple[str, ...] = ()
    """More lines, where one is not enough: a command's diff, packages."""
    first: int | None = None
    """The first link of the disk's chain that differs by it: 0 are base and copies, then the steps
    as they are numbered; None: no step runs again, only what comes after them."""

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
