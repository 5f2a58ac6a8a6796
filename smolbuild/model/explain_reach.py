"""How far a changed leaf reaches: from which link of the disk's chain on everything is new.

It follows what ``model.key.step_chain`` puts into each link; a test holds the two together.
"""

from collections.abc import Iterable, Mapping

from smolbuild.core.canon import Json
from smolbuild.model.keytree import Change, KeyTree

__all__ = ["Reach"]

_LATE_FIELDS = frozenset(
    (
        ("contract", "engine"),
        ("contract", "engineVersion"),
        ("contract", "accelerator"),
        ("run", "entrypoint"),
        ("run", "cmd"),
    )
)
"""Fields that no link of the chain holds."""
_LATE = ("network", "health", "restore", "scrub", "service")
"""Leaves that no link of the chain holds; a step's network stands in the step."""


class Reach:
    """Knows the steps and sources of two key trees."""

    def __init__(self, old: KeyTree, new: KeyTree) -> None:
        self._old, self._new = _Steps(old), _Steps(new)

    def first(self, change: Change) -> int | None:
        """Return ``Change.first`` of ``change``."""
        kind, _, name = change.leaf.partition(" ")
        if kind == "step":
            return self._step(change)
        if kind == "file":
            return self._file(name)
        if kind == "order":
            return self._order(change)
        if kind == "network":
            return min(self._followers(), default=None)
        if kind in _LATE or (kind, change.field) in _LATE_FIELDS:
            return None
        return 0

    def is_said_elsewhere(self, change: Change, changes: Iterable[Change]) -> bool:
        """Return whether another change says it better.

        A step's network that follows ``[network]``, and a digest of paths when the paths that came
        and went, or the sources, are there to see.
        """
        if change.leaf in self._new.numbers and change.field.startswith("network."):
            return self._new.numbers.get(change.leaf) in self._followers()
        if change.field != "files" and not change.field.endswith(".files"):
            return False
        sources = {
            *self._old.sources_of(change.leaf),
            *self._new.sources_of(change.leaf),
        }
        for other in changes:
            path = other.leaf.removeprefix("file ")
            moved = other.leaf.startswith("file ") and not other.field
            if moved and any(_covers(source, path) for source in sources):
                return True
            if other.leaf == change.leaf and other.field in {"inputs", "from"}:
                return True
        return False

    def _step(self, change: Change) -> int | None:
        if change.field == "name":
            return None
        number = self._new.numbers.get(change.leaf)
        if number is not None:
            return number
        number = self._old.numbers[change.leaf]
        return number if number <= len(self._new.numbers) else None

    def _file(self, path: str) -> int | None:
        if any(_covers(source, path) for source in self._new.copied):
            return 0
        used = [
            number
            for name, number in self._new.numbers.items()
            if any(_covers(source, path) for source in self._new.sources_of(name))
        ]
        return min(used, default=None)

    def _order(self, change: Change) -> int | None:
        if change.field != "step":
            return 0 if change.field == "copy" else None
        old, new = change.old, change.new
        if not isinstance(old, list) or not isinstance(new, list):
            return 0
        moved = (after for before, after in zip(old, new, strict=False) if before != after)
        return min((self._new.numbers.get(str(name), 0) for name in moved), default=None)

    def _followers(self) -> set[int]:
        """Return the numbers of the steps whose network changed as ``[network]`` did."""
        old, new = self._old.network, self._new.network
        if old == new:
            return set()
        return {
            number
            for name, number in self._new.numbers.items()
            if name in self._old.values
            and self._old.values[name].get("network") == old
            and self._new.values[name].get("network") == new
        }


class _Steps:
    def __init__(self, tree: KeyTree) -> None:
        leaves = {name: _mapping(item.value) for name, item in tree.leaves.items()}
        self.values = {name: value for name, value in leaves.items() if name.startswith("step ")}
        self.numbers = {name: number for number, name in enumerate(self.values, start=1)}
        self.network = leaves.get("network")
        self._copies = {n: str(v.get("from")) for n, v in leaves.items() if n.startswith("copy ")}
        self.copied = set(self._copies.values())

    def sources_of(self, name: str) -> set[str]:
        """Return the inputs and the copies' sources of the leaf ``name``."""
        if name in self._copies:
            return {self._copies[name]}
        value = self.values.get(name, {})
        inputs, copies = value.get("inputs"), value.get("copy")
        found = {str(source) for source in inputs} if isinstance(inputs, list | tuple) else set()
        if isinstance(copies, list | tuple):
            found |= {str(_mapping(copy).get("from")) for copy in copies}
        return found


def _covers(source: str, path: str) -> bool:
    return source in {".", path} or path.startswith(f"{source}/")


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}
