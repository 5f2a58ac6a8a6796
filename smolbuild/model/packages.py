"""How two sets of packages differ."""

from collections.abc import Mapping

from smolbuild.core.values import dataclass
from smolbuild.model.debian_version import compare_versions

__all__ = ["PackageChange", "compare_packages", "package_counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageChange:
    """One package that came (``old`` is None), went (``new`` is None) or has another version."""

    name: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        """Return the change as one readable line."""
        if self.old is None:
            return f"+ {self.name} {self.new}"
        if self.new is None:
            return f"- {self.name} {self.old}"
        return f"{self.name} {self.old} -> {self.new}"

    @property
    def kind(self) -> str:
        """Return ``added``, ``removed``, ``newer``, ``older`` or ``changed``."""
        if self.old is None:
            return "added"
        if self.new is None:
            return "removed"
        order = compare_versions(self.old, self.new)
        return "newer" if order < 0 else "older" if order > 0 else "changed"


def compare_packages(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[PackageChange, ...]:
    """Return what differs between two mappings of package names to versions, sorted by name."""
    return tuple(
        PackageChange(name=name, old=old.get(name), new=new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def package_counts(changes: tuple[PackageChange, ...]) -> str:
    """Return ``3 packages newer, 1 added``; empty when there is no change."""
    words: list[str] = []
    for kind in ("newer", "older", "changed", "added", "removed"):
        number = sum(change.kind == kind for change in changes)
        if number:
            noun = "" if words else " package" if number == 1 else " packages"
            words.append(f"{number}{noun} {kind}")
    return ", ".join(words)
