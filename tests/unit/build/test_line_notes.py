"""Which lines of a file changed since a build that is remembered by hashes only."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.build import line_notes
from smolbuild.build.files import collect_files
from smolbuild.build.line_notes import line_words, lines_now, note_lines, read_notes
from smolbuild.core.digest import Digest, digest_bytes
from smolbuild.model.declared import DeclaredFiles
from smolbuild.model.smolfile import Copy, Smolfile

KEY = Digest("sha256:" + "a" * 64)
MANY = "line 1 changed, line 3 changed, line 5 changed, 1 more"
TEXT = "".join(f"line {number}\n" for number in range(1, 11))


def declared(directory: Path, *names: str) -> DeclaredFiles:
    copies = tuple(Copy(source=name, to="/") for name in names)
    return collect_files(directory, Smolfile(path=directory / "Smolfile", copy=copies))


def words(tmp_path: Path, old: str | bytes, new: str | bytes) -> str:
    """Note a file as it is, change it, and ask."""
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    for directory in (tree, cache):
        directory.mkdir(exist_ok=True)
    before, after = (text.encode() if isinstance(text, str) else text for text in (old, new))
    (tree / "f").write_bytes(before)
    note_lines(cache, KEY, declared(tree, "f"))
    (tree / "f").write_bytes(after)
    was = read_notes(cache, KEY).get(digest_bytes(before))
    return line_words(was, lines_now(declared(tree, "f"), "f"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (TEXT, TEXT.replace("line 4\n", "other\n"), "line 4 changed"),
        (TEXT, TEXT.replace("line 4\nline 5\n", "x\ny\n"), "lines 4-5 changed"),
        (TEXT, TEXT.replace("line 4\n", "line 4\nnew\n"), "line 5 added"),
        (TEXT, TEXT + "a\nb\n", "lines 11-12 added"),
        (TEXT, TEXT.replace("line 4\n", ""), "1 line removed after line 3"),
        (TEXT, TEXT.replace("line 1\nline 2\n", ""), "2 lines removed at the start"),
        (TEXT, "".join(TEXT.splitlines(keepends=True)[:8]), "2 lines removed after line 8"),
        ("a", "b", "line 1 changed"),
        ("", "a\n", "line 1 added"),
        ("1\n2\n3\n4\n5\n6\n7\n", "1x\n2\n3x\n4\n5x\n6\n7x\n", MANY),
        (b"\0binary", TEXT, ""),
        (TEXT, b"\0binary", ""),
        ("x" * 300_000, TEXT, ""),
    ],
)
def test_what_is_said_of_a_change(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert words(tmp_path, old, new) == said


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_two_lists_of_lines_differ_where_it_is_said(old: list[str], new: list[str]) -> None:
    before, after = ([text.encode() for text in lines] for lines in (old, new))
    rest, place = [], 0
    for start, end, new_start, new_end in line_notes._differences(before, after):
        assert (start, new_start) != (end, new_end)
        rest += before[place:start] + after[new_start:new_end]
        place = end
    assert rest + before[place:] == after


def test_a_file_that_changed_after_it_was_collected_is_not_noted(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(TEXT)
    files = declared(tmp_path, "f")
    (tmp_path / "f").write_text("other\n")
    note_lines(tmp_path, KEY, files)
    assert read_notes(tmp_path, KEY) == {}


def test_notes_hold_no_content_and_are_few(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(line_notes, "_MAX_NOTES", 3)
    (tmp_path / "f").write_text("password = hunter2\n")
    files = declared(tmp_path, "f")
    for number in range(5):
        note_lines(tmp_path, Digest(f"sha256:{number:064}"), files)
    notes = list((tmp_path / "lines").iterdir())
    assert len(notes) == 3
    assert all(b"hunter2" not in path.read_bytes() for path in notes)


def test_a_long_change_is_one_place(tmp_path: Path) -> None:
    old = "".join(f"{number}\n" for number in range(5000))
    new = "".join(f"{number}x\n" for number in range(5000))
    assert words(tmp_path, old, new) == "lines 1-5000 changed"


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"a": 1}', b'{"a": "zz"}'])
def test_damaged_notes_are_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / f"{'a' * 64}.json").write_bytes(damage)
    assert read_notes(tmp_path, KEY) == {}


def test_no_notes_are_none(tmp_path: Path) -> None:
    assert read_notes(tmp_path, KEY) == {}
    (tmp_path / "f").write_text(TEXT)
    assert line_words(None, lines_now(declared(tmp_path, "f"), "f")) == ""
