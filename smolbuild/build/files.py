"""Declared files: found and digested before a build, streamed into the guest during it.

Of a file's mode only the owner's executable bit counts, as in git: a checkout made under another
umask is the same input and gives the same guest. What is copied arrives as 0644 or 0755, owned by
root, unless the copy says otherwise.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from smolbuild.build.ignore import IgnoreRules, parse_ignore
from smolbuild.core.digest import Digest
from smolbuild.core.errors import Problem, SmolfileError
from smolbuild.core.values import dataclass
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.lock import lock_path
from smolbuild.model.smolfile import Smolfile
from smolbuild.source.file_entry import file_entry
from smolbuild.source.stat_cache import CLOCK_PREFIX, digest_files

__all__ = [
    "IGNORE_FILE",
    "collect_files",
    "declared_sources",
    "ignore_rules",
]

IGNORE_FILE = ".smolbuildignore"
_ALWAYS = (".git", ".smolbuild", f"{CLOCK_PREFIX}*")


def collect_files(context: Path, smolfile: Smolfile, *, cache: Path | None = None) -> DeclaredFiles:
    """Find and digest every file that copies and step inputs declare, in ``context``.

    The result does not depend on the order of directory listings, on mtimes, owners, the umask or
    on where ``context`` lies. Directories leave out ``.git``, the lock and what
    ``.smolbuildignore`` names; what a copy or input names itself is always taken. Symlinks are kept
    and never followed. With ``cache`` (``Home.cache``) a file is read only when it may have changed
    since it was (see ``source.stat_cache``).

    Raises:
        SmolfileError: sources that are missing, unreadable, special files or reached through a
            symlink; all of them, each with the line that declares it.

    """
    problems: list[Problem] = []
    declared = declared_sources(smolfile)
    rules = ignore_rules(context, smolfile.path, problems)
    finder = _Finder(context=str(context), rules=rules)
    selections: dict[str, list[str]] = {}
    for source, key in declared.items():
        try:
            selections[source] = finder.find(source)
        except _BadSource as error:
            problems.append(_problem(smolfile, key, error))
    entries: dict[str, FileEntry] = {}
    regular = {path: st for path, st in finder.seen.items() if stat.S_ISREG(st.st_mode)}
    digests = digest_files(context, regular, cache)
    for source, paths in selections.items():
        try:
            for path in paths:
                if path not in entries:
                    entries[path] = _entry(context, path, finder.seen[path], digests)
        except _BadSource as error:
            problems.append(_problem(smolfile, declared[source], error))
    if problems:
        raise SmolfileError(tuple(problems))
    return DeclaredFiles(
        context=context,
        selections={
            source: tuple(entries[path] for path in paths) for source, paths in selections.items()
        },
    )


def _problem(smolfile: Smolfile, key: str, error: "_BadSource") -> Problem:
    file, line = smolfile.where(key)
    return Problem(file=file, line=line, key=key, message=str(error), hint=error.hint)


def declared_sources(smolfile: Smolfile) -> Mapping[str, str]:
    """Return every declared source with the key that declares it first."""
    found: dict[str, str] = {}
    for copy in smolfile.copy:
        found.setdefault(copy.source, copy.key)
    for step in smolfile.steps:
        for index, source in enumerate(step.inputs):
            found.setdefault(source, f"{step.key}.inputs[{index}]")
        for copy in step.copy:
            found.setdefault(copy.source, copy.key)
    return found


def ignore_rules(context: Path, smolfile: Path, problems: list[Problem]) -> IgnoreRules:
    """Return what directories of ``context`` leave out; what is wrong with the file is added."""
    always = (*_ALWAYS, f"/{lock_path(smolfile).name}")
    path = context / IGNORE_FILE
    try:
        return parse_ignore([*always, *path.read_text(encoding="utf-8").splitlines()])
    except FileNotFoundError:
        return parse_ignore(always)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(
            Problem(file=str(path), line=0, key="", message=f"it cannot be read: {error}")
        )
        return parse_ignore(always)


class _BadSource(Exception):  # noqa: N818 - becomes a Problem where the key is known
    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finder:
    """Walks sources; ``seen`` is what ``lstat`` said of each path."""

    context: str
    rules: IgnoreRules
    seen: dict[str, os.stat_result] = field(default_factory=dict)

    def find(self, source: str) -> list[str]:
        self._refuse_symlinked_parents(source)
        status = self._look(source)
        found = [] if source == "." else [source]
        if stat.S_ISDIR(status.st_mode):
            pending = [source]
            while pending:
                self._list(pending.pop(), source, found, pending)
        return sorted(found)

    def _refuse_symlinked_parents(self, source: str) -> None:
        parts = source.split("/")[:-1]
        for count in range(1, len(parts) + 1):
            parent = "/".join(parts[:count])
            if Path(self.context, parent).is_symlink():
                raise _BadSource(
                    f"{source} is reached through the symlink {parent}",
                    "name the file by its own path inside the Smolfile's directory",
                )

    def _look(self, source: str) -> os.stat_result:
        try:
            _refuse_foreign(source)
            status = self.seen.get(source) or os.lstat(f"{self.context}/{source}")
        except FileNotFoundError as error:
            raise _BadSource(
                f"there is no {source} in the Smolfile's directory",
                "the path is relative to the Smolfile",
            ) from error
        except OSError as error:
            raise _BadSource(f"{source} cannot be read: {error.strerror}") from error
        _refuse_special(source, status)
        self.seen[source] = status
        return status

    def _list(self, directory: str, source: str, found: list[str], pending: list[str]) -> None:
        """Add what lies in ``directory`` to ``found``, and its directories to ``pending`` too."""
        prefix = "" if directory == "." else f"{directory}/"
        try:
            with os.scandir(f"{self.context}/{directory}") as listing:
                for item in listing:
                    path = prefix + item.name
                    is_directory = item.is_dir(follow_symlinks=False)
                    if self.rules.leaves_out(path, directory=is_directory):
                        continue
                    if path not in self.seen:
                        _refuse_foreign(path)
                        status = item.stat(follow_symlinks=False)
                        _refuse_special(path, status)
                        self.seen[path] = status
                    found.append(path)
                    if is_directory:
                        pending.append(path)
        except FileNotFoundError as error:
            raise _BadSource(f"{directory} (in {source}) changed while it was listed") from error
        except OSError as error:
            raise _BadSource(f"{directory} cannot be read: {error.strerror}") from error


def _refuse_foreign(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise _BadSource(
            f"the file name {path!r} is not UTF-8", "rename it, or leave it out"
        ) from error


def _refuse_special(path: str, status: os.stat_result) -> None:
    if stat.S_IFMT(status.st_mode) not in (stat.S_IFDIR, stat.S_IFLNK, stat.S_IFREG):
        raise _BadSource(
            f"{path} is not a file, directory or symlink",
            f"leave it out with {IGNORE_FILE}, or name the files one by one",
        )


def _entry(
    context: Path,
    path: str,
    status: os.stat_result,
    digests: Mapping[str, Digest | OSError],
) -> FileEntry:
    digest = digests[path] if stat.S_ISREG(status.st_mode) else None
    try:
        return file_entry(context, path, status, digest)
    except OSError as error:
        raise _BadSource(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise _BadSource(
            f"the target of the symlink {path} is not UTF-8", "rename it, or leave it out"
        ) from error
