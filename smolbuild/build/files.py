"""Declared files: found and digested before a build, streamed into the guest during it.

Of a file's mode only the owner's executable bit counts, as in git: a checkout made under another
umask is the same input and gives the same guest. What is copied arrives as 0644 or 0755, owned by
root, unless the copy says otherwise.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from smolbuild.build.ignore import IgnoreRules, parse_ignore
from smolbuild.core.digest import digest_file
from smolbuild.core.errors import Problem, SmolfileError
from smolbuild.core.values import dataclass
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.lock import lock_path
from smolbuild.model.smolfile import Smolfile

__all__ = [
    "IGNORE_FILE",
    "collect_files",
]

IGNORE_FILE = ".smolbuildignore"
_ALWAYS = (".git", ".smolbuild")


def collect_files(context: Path, smolfile: Smolfile) -> DeclaredFiles:
    """Find and digest every file that copies and step inputs declare, in ``context``.

    The result does not depend on the order of directory listings, on mtimes, owners, the umask or
    on where ``context`` lies. Directories leave out ``.git``, the lock and what
    ``.smolbuildignore`` names; what a copy or input names itself is always taken. Symlinks are kept
    and never followed.

    Raises:
        SmolfileError: sources that are missing, unreadable, special files or reached through a
            symlink; all of them, each with the line that declares it.

    """
    problems: list[Problem] = []
    declared = _declared(smolfile)
    rules = _ignore_rules(context, smolfile, problems)
    finder = _Finder(context=context, rules=rules)
    selections = {}
    for source, key in declared.items():
        try:
            selections[source] = finder.find(source)
        except _BadSource as error:
            file, line = smolfile.where(key)
            problems.append(
                Problem(file=file, line=line, key=key, message=str(error), hint=error.hint)
            )
    if problems:
        raise SmolfileError(tuple(problems))
    return DeclaredFiles(context=context, selections=selections)


def _declared(smolfile: Smolfile) -> Mapping[str, str]:
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


def _ignore_rules(context: Path, smolfile: Smolfile, problems: list[Problem]) -> IgnoreRules:
    always = (*_ALWAYS, f"/{lock_path(smolfile.path).name}")
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
    context: Path
    rules: IgnoreRules
    seen: dict[str, FileEntry] = field(default_factory=dict)

    def find(self, source: str) -> tuple[FileEntry, ...]:
        self._refuse_symlinked_parents(source)
        entries = []
        pending = [source]
        while pending:
            path = pending.pop()
            entry = self._entry(path, source)
            if path != ".":
                entries.append(entry)
            if entry.kind == "dir":
                pending.extend(self._children(path))
        return tuple(sorted(entries, key=lambda entry: entry.path))

    def _refuse_symlinked_parents(self, source: str) -> None:
        parts = source.split("/")[:-1]
        for count in range(1, len(parts) + 1):
            parent = "/".join(parts[:count])
            if (self.context / parent).is_symlink():
                raise _BadSource(
                    f"{source} is reached through the symlink {parent}",
                    "name the file by its own path inside the Smolfile's directory",
                )

    def _children(self, directory: str) -> Iterator[str]:
        try:
            with os.scandir(self.context / directory) as listing:
                found = [(item.name, item.is_dir(follow_symlinks=False)) for item in listing]
        except OSError as error:
            raise _BadSource(f"{directory} cannot be read: {error.strerror}") from error
        for name, is_directory in found:
            path = name if directory == "." else f"{directory}/{name}"
            if not self.rules.leaves_out(path, directory=is_directory):
                yield path

    def _entry(self, path: str, source: str) -> FileEntry:
        if path not in self.seen:
            try:
                path.encode()
                self.seen[path] = self._look(path)
            except UnicodeEncodeError as error:
                raise _BadSource(
                    f"the file name {path!r} is not UTF-8", "rename it, or leave it out"
                ) from error
            except FileNotFoundError as error:
                where = path if path == source else f"{path} (in {source})"
                raise _BadSource(
                    f"there is no {where} in the Smolfile's directory",
                    "the path is relative to the Smolfile",
                ) from error
            except OSError as error:
                raise _BadSource(f"{path} cannot be read: {error.strerror}") from error
        return self.seen[path]

    def _look(self, path: str) -> FileEntry:
        full = self.context / path
        status = full.lstat()
        if stat.S_ISDIR(status.st_mode):
            return FileEntry(path=path, kind="dir")
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(full)  # noqa: PTH115 - Path would rewrite the target
            target.encode()
            return FileEntry(path=path, kind="symlink", target=target)
        if not stat.S_ISREG(status.st_mode):
            raise _BadSource(
                f"{path} is not a file, directory or symlink",
                f"leave it out with {IGNORE_FILE}, or name the files one by one",
            )
        return FileEntry(
            path=path,
            kind="file",
            executable=bool(status.st_mode & stat.S_IXUSR),
            digest=digest_file(full),
            size=status.st_size,
        )
