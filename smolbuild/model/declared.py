"""Declared files as values: what copies and step inputs name in the Smolfile's directory."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest
from smolbuild.core.values import dataclass

__all__ = ["DeclaredFiles", "FileEntry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file, directory or symlink.

    Of the mode only the owner's executable bit counts, as in git, so that a checkout made under
    another umask is the same input.
    """

    path: str
    """Relative to the Smolfile's directory, POSIX."""
    kind: Literal["file", "dir", "symlink"]
    executable: bool = False
    digest: Digest | None = None
    """Of a file's content."""
    target: str | None = None
    """Of a symlink, as it is: never followed."""
    size: int = 0
    """Bytes, of a file."""

    def identity(self) -> Mapping[str, Json]:
        """Return what of it is an input; the path is not part of it."""
        if self.kind == "dir":
            return {"kind": "dir"}
        if self.kind == "symlink":
            return {"kind": "symlink", "target": self.target}
        return {"kind": "file", "executable": self.executable, "content": self.digest}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredFiles:
    """For each declared source its entries, sorted by path, the source itself first.

    The source ``.`` has no entry of its own.
    """

    context: Path = field(compare=False)
    """The Smolfile's directory, for reading contents; where it lies is not part of the value."""
    selections: Mapping[str, tuple[FileEntry, ...]] = field(default_factory=dict)

    def under(self, source: str) -> tuple[FileEntry, ...]:
        """Return the entries of ``source``.

        Raises:
            KeyError: this source was not collected.

        """
        return self.selections[source]

    def entries(self) -> tuple[FileEntry, ...]:
        """Return every entry once, sorted by path."""
        unique = {entry.path: entry for found in self.selections.values() for entry in found}
        return tuple(unique[path] for path in sorted(unique))
