"""What a Dockerfile is built from: the Dockerfile, the files it may copy, arguments and target.

As with declared files, a checkout made under another umask or by another user is the same: of a
file's mode only the owner's executable bit counts, and what is sent has fixed times and owners. The
Smolfile, its lock and ``.git`` are left out unless ``.dockerignore`` takes them in with ``!``.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, digest_value
from smolbuild.core.errors import BuildError, UsageError
from smolbuild.core.files import private_directory
from smolbuild.core.values import dataclass
from smolbuild.model.declared import FileEntry
from smolbuild.model.lock import lock_path
from smolbuild.model.parse import sibling_path
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.dockerignore import DockerIgnore, parse_dockerignore
from smolbuild.source.file_entry import file_entry
from smolbuild.source.stat_cache import CLOCK_PREFIX, digest_files

__all__ = ["DockerContext", "collect_context"]

_IGNORE_FILE = ".dockerignore"
_DOMAIN = "smolbuild.dockerfile.v1"
_OUTSIDE = ".smolbuild-dockerfile"
"""What a Dockerfile that lies outside of its context is called inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerContext:
    """The files that an engine is sent, sorted by path, and how the Dockerfile is called there."""

    directory: Path
    files: tuple[FileEntry, ...]
    dockerfile: str
    outside: tuple[Path, FileEntry] | None
    """Directory and entry of a Dockerfile that is not below ``directory``."""
    digest: Digest
    """Over all of it, arguments and target too."""

    def tar(self) -> Iterator[bytes]:
        """Yield it as a tar archive: the same files always give the same bytes.

        Raises:
            BuildError: a file changed since it was digested.

        """
        from smolbuild.source.tarwriter import END, file_member

        for entry in self.files:
            yield from file_member(self.directory, entry, entry.path)
        if self.outside is not None:
            yield from file_member(*self.outside, self.dockerfile)
        yield END


def collect_context(
    smolfile: Smolfile, base: Dockerfile, *, cache: Path | None = None
) -> DockerContext:
    """Find and digest all that building ``base`` depends on.

    With ``cache`` (``Home.cache``) a file is read only when it may have changed since it was.

    Raises:
        UsageError: the Dockerfile or the directory is missing, or ``.dockerignore`` is malformed.
        BuildError: a file cannot be read, or is neither file, directory nor link.

    """
    root = smolfile.path.parent
    directory = root / base.context
    if not directory.is_dir():
        raise _missing(smolfile, "context", base.context, "directory")
    if not (root / base.dockerfile).is_file():
        raise _missing(smolfile, "dockerfile", base.dockerfile, "file")
    inner = os.path.relpath(root / base.dockerfile, directory)
    inside = not inner.startswith("..")
    keep = frozenset({_IGNORE_FILE, *((inner,) if inside else ())})
    rules = _rules(smolfile, directory)
    found = sorted(_walk(directory, rules, keep))
    store = None if cache is None else private_directory(cache / "dockerfile")
    files = _entries(directory, found, store)
    outside = None if inside else (root, _entries(root, [base.dockerfile], store)[0])
    value: Json = {
        "files": {entry.path: entry.identity() for entry in files},
        "dockerfile": inner if outside is None else outside[1].identity(),
        "args": dict(base.args),
        "target": base.target,
    }
    return DockerContext(
        directory=directory,
        files=files,
        dockerfile=inner if inside else _OUTSIDE,
        outside=outside,
        digest=digest_value(_DOMAIN, value),
    )


def _rules(smolfile: Smolfile, directory: Path) -> DockerIgnore:
    own = (smolfile.path, sibling_path(smolfile.path), lock_path(smolfile.path))
    usual = [
        ".git",
        ".smolbuild",
        f"**/{CLOCK_PREFIX}*",
        *(os.path.relpath(path, directory) for path in own),
    ]
    path = directory / _IGNORE_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return parse_dockerignore([*usual, *lines])
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}", code="dockerignore") from error


def _walk(directory: Path, rules: DockerIgnore, keep: frozenset[str]) -> Iterator[str]:
    """Yield the paths of what is sent; a directory that is left out when something in it is not."""
    pending = [""]
    given: set[str] = set()
    while pending:
        path = pending.pop()
        for name, is_directory in _listing(directory, path):
            below = f"{path}/{name}" if path else name
            out = below not in keep and rules.leaves_out(below)
            if is_directory and (not out or rules.takes_in_below(below) or _above(below, keep)):
                pending.append(below)
            if out:
                continue
            parent = below
            while parent not in given:
                given.add(parent)
                yield parent
                parent = parent.rpartition("/")[0]
                if not parent:
                    break


def _above(path: str, keep: frozenset[str]) -> bool:
    return any(name.startswith(path + "/") for name in keep)


def _listing(directory: Path, path: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(directory / path) as listing:
            return [(item.name, item.is_dir(follow_symlinks=False)) for item in listing]
    except OSError as error:
        raise BuildError(f"{directory / path} cannot be read: {error.strerror}") from error


def _entries(directory: Path, paths: Sequence[str], cache: Path | None) -> tuple[FileEntry, ...]:
    """Return what is at ``paths``, in the same order."""
    seen: dict[str, os.stat_result] = {}
    for path in paths:
        try:
            path.encode()
            seen[path] = (directory / path).lstat()
        except UnicodeEncodeError as error:
            raise _unusable(path, "its name is not UTF-8") from error
        except OSError as error:
            raise _unusable(path, f"it cannot be read: {error.strerror}") from error
    regular = {path: status for path, status in seen.items() if stat.S_ISREG(status.st_mode)}
    digests = digest_files(directory, regular, cache)
    return tuple(_entry(directory, path, seen[path], digests) for path in paths)


def _entry(
    directory: Path,
    path: str,
    status: os.stat_result,
    digests: Mapping[str, Digest | OSError],
) -> FileEntry:
    digest = digests.get(path)
    is_link = stat.S_ISLNK(status.st_mode)
    if digest is None and not is_link and not stat.S_ISDIR(status.st_mode):
        raise _unusable(path, "it is not a file, directory or symlink")
    try:
        return file_entry(directory, path, status, digest)
    except UnicodeEncodeError as error:
        raise _unusable(path, f"its target cannot be read: {error}") from error
    except OSError as error:
        why = (
            f"its target cannot be read: {error}"
            if is_link
            else f"it cannot be read: {error.strerror}"
        )
        raise _unusable(path, why) from error


def _unusable(path: str, why: str) -> BuildError:
    return BuildError(
        f"the Dockerfile's context holds {path!r}, but {why}",
        hint=f"leave it out with {_IGNORE_FILE}",
        code="docker-context",
    )


def _missing(smolfile: Smolfile, key: str, path: str, what: str) -> UsageError:
    file, line = smolfile.where(f"smolbuild.base.{key}")
    return UsageError(
        f"{file}:{line}: there is no {what} {path} in the Smolfile's directory",
        hint="the path is relative to the Smolfile",
        code="missing-dockerfile" if key == "dockerfile" else "missing-context",
    )
