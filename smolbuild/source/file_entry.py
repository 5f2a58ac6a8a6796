"""A file, directory or symlink of a tree of inputs, as a value."""

import os
import stat
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.model.declared import FileEntry

__all__ = ["file_entry"]


def file_entry(
    directory: Path, path: str, status: os.stat_result, digest: Digest | OSError | None
) -> FileEntry:
    """Return the entry of ``path`` below ``directory``.

    Args:
        directory: what the path is relative to.
        path: POSIX; of a file, directory or symlink.
        status: what ``lstat`` says of it.
        digest: of a file's content, or why it cannot be read; None for anything else.

    Raises:
        OSError: the file, or the target of the symlink, cannot be read.
        UnicodeEncodeError: the target of the symlink is not UTF-8.

    """
    if stat.S_ISDIR(status.st_mode):
        return FileEntry(path=path, kind="dir")
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(directory / path)  # noqa: PTH115 - Path would rewrite the target
        target.encode()
        return FileEntry(path=path, kind="symlink", target=target)
    if isinstance(digest, OSError):
        raise digest
    return FileEntry(
        path=path,
        kind="file",
        executable=bool(status.st_mode & stat.S_IXUSR),
        digest=digest,
        size=status.st_size,
    )
