"""Which lines of a declared file changed since a build, known without keeping its content.

When an artifact is built, the hashes of the lines of each small text file go into
``cache/lines/<provenance key>.json``; the next plan compares the file of now with them. What is
not there, or was another content when it was noted, is simply not said.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.core.files import private_directory, write_atomic
from smolbuild.core.text import counted
from smolbuild.model.declared import DeclaredFiles, FileEntry

__all__ = ["line_words", "lines_now", "note_lines", "read_notes"]

_MAX_BYTES = 256 * 1024
_MAX_FILES = 2000
_MAX_LINES = 100_000
_MAX_NOTES = 64
"""Builds of which notes are kept."""
_MAX_NOTE_BYTES = 16 * 1024 * 1024
_HASH = 6
"""Bytes of a line's hash: enough to tell lines apart, too few to stand for them."""
_COMPARED = 2000
"""Lines that are compared one with each other, when what begins and ends alike is taken away."""
_PLACES = 3


def note_lines(cache: Path, key: Digest, files: DeclaredFiles) -> None:
    """Note the lines of the small text files among ``files`` for the build ``key``. Idempotent.

    Bounded: the largest files, the last of very many and the oldest builds are left out.

    Raises:
        OSError: the disk is full, for example.

    """
    notes: dict[str, str] = {}
    left = _MAX_LINES
    for entry in files.entries():
        if len(notes) >= _MAX_FILES:
            break
        hashes = _hashes(files.context, entry)
        if hashes is not None and len(hashes) <= left and entry.digest is not None:
            left -= len(hashes)
            notes[entry.digest] = b"".join(hashes).hex()
    shelf = private_directory(cache / "lines")
    write_atomic(shelf / f"{hex_of(key)}.json", json.dumps(notes).encode())
    _forget_oldest(shelf)


def read_notes(cache: Path, key: Digest) -> dict[Digest, list[bytes]]:
    """Return the line hashes by content that were noted for the build ``key``; empty: none."""
    path = cache / "lines" / f"{hex_of(key)}.json"
    try:
        if path.stat().st_size > _MAX_NOTE_BYTES:
            return {}
        notes = json.loads(path.read_bytes())
        return {Digest(digest): _split(bytes.fromhex(text)) for digest, text in notes.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def lines_now(files: DeclaredFiles, path: str) -> list[bytes] | None:
    """Return the line hashes of the file ``path`` as it is now; None: it is no small text file."""
    entry = next((each for each in files.entries() if each.path == path), None)
    return None if entry is None else _hashes(files.context, entry)


def line_words(old: Sequence[bytes] | None, new: Sequence[bytes] | None) -> str:
    """Return ``line 4 changed`` for the line hashes of two contents; nothing when not known."""
    if old is None or new is None:
        return ""
    places = [_place(*each) for each in _differences(list(old), list(new))]
    more = len(places) - _PLACES
    if more > 0:
        places[_PLACES:] = [f"{more} more"]
    return ", ".join(places)


def _differences(old: list[bytes], new: list[bytes]) -> Iterable[tuple[int, int, int, int]]:
    """Return ``(old start, old end, new start, new end)`` of what differs, 0-based."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    before, after = old[head : len(old) - tail], new[head : len(new) - tail]
    if max(len(before), len(after)) > _COMPARED:
        return [(head, len(old) - tail, head, len(new) - tail)]
    import difflib

    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        (a + head, b + head, c + head, d + head)
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def _place(old_start: int, old_end: int, start: int, end: int) -> str:
    removed, added = old_end - old_start, end - start
    if not added:
        where = f"after line {start}" if start else "at the start"
        return f"{counted(removed, 'line')} removed {where}"
    verb = "changed" if removed else "added"
    return f"line {end} {verb}" if added == 1 else f"lines {start + 1}-{end} {verb}"


def _hashes(context: Path, entry: FileEntry) -> list[bytes] | None:
    """Return the hashes of the lines, or None: not a small text file, or no longer what it was."""
    if entry.kind != "file" or entry.size > _MAX_BYTES:
        return None
    try:
        with (context / entry.path).open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError:
        return None
    if b"\0" in data or digest_bytes(data) != entry.digest:
        return None
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [hashlib.sha256(line).digest()[:_HASH] for line in lines]


def _split(data: bytes) -> list[bytes]:
    return [data[place : place + _HASH] for place in range(0, len(data), _HASH)]


def _forget_oldest(shelf: Path) -> None:
    with os.scandir(shelf) as listing:
        notes = [(entry.stat().st_mtime, entry.path) for entry in listing]
    for _, path in sorted(notes)[:-_MAX_NOTES]:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
