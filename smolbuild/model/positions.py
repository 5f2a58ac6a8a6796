"""On which line each key of a TOML document stands.

``tomllib`` gives values without positions, so this scanner walks the same text and notes where
each key begins. It builds no values and reports no syntax errors: it notes what it understands and
leaves the judgement to ``tomllib``. It runs first, and refuses nesting that no Smolfile has,
because ``tomllib`` spends quadratic time or all of the stack on it.
"""

import bisect
import contextlib
import json
import re
import tomllib
from collections.abc import Mapping

__all__ = ["NestingError", "join_key", "scan_positions"]

_MAX_PARTS = 64
_MAX_DEPTH = 64
_MAX_PATH = 200

_BLANK = re.compile(r"[ \t]*+")
_TRIVIA = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_BARE = re.compile(r"[A-Za-z0-9_-]++")
_QUOTED = re.compile(r'"(?:[^"\\\n]++|\\.)*+"' r"|'[^'\n]*+'")
_STRING = re.compile(
    r'"""(?:[^"\\]++|\\.|""?(?!"))*+"""(?:"{0,2})'
    r"|'''(?:[^']++|''?(?!'))*+'''(?:'{0,2})"
    r'|"(?:[^"\\\n]++|\\.)*+"'
    r"|'[^'\n]*+'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^\s,\[\]{}#]++(?: \d\d:[^\s,\]}#]++)?")


class NestingError(ValueError):
    """The document nests keys, arrays or tables deeper than any Smolfile; ``line`` says where."""

    def __init__(self, line: int) -> None:
        super().__init__(f"nested more than {_MAX_DEPTH} levels deep")
        self.line = line


class _Stop(Exception):  # noqa: N818 - a signal between scanner functions, never an error
    """The scanner does not understand the text: the parser proper will say why."""


def join_key(path: str, part: str) -> str:
    """Return the dotted path of key ``part`` below ``path``; a part that is not bare is quoted."""
    if not _BARE.fullmatch(part):
        part = json.dumps(part, ensure_ascii=False)
    return f"{path}.{part}" if path else part


def scan_positions(text: str) -> Mapping[str, int]:
    """Return the 1-based line of each key of the TOML document ``text``, by dotted path.

    Elements of arrays are ``key[0]``, counted from zero. A table that has its own header stands
    where the header is. Of a document that is not valid TOML, what comes before the mistake is
    returned.

    Raises:
        NestingError: keys, arrays or inline tables nest deeper than any Smolfile.

    """
    scanner = _Scanner(text)
    with contextlib.suppress(_Stop):
        scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.newlines = [match.start() for match in re.finditer("\n", text)]

    def document(self) -> None:
        table: str | None = ""
        while True:
            self.skip(_TRIVIA)
            if self.at >= len(self.text):
                return
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.assignment(table, 0)

    def header(self) -> str | None:
        array = self.text.startswith("[[", self.at)
        self.at += 2 if array else 1
        parts = self.key()
        self.expect("]]" if array else "]")
        path: str | None = ""
        for part, offset in parts[:-1]:
            path = self.note(path, part, offset)
            if path in self.counts:
                path = f"{path}[{self.counts[path] - 1}]"
        part, offset = parts[-1]
        path = self.note(path, part, offset)
        if path is None:
            return None
        if array:
            index = self.counts.get(path, 0)
            self.counts[path] = index + 1
            path = f"{path}[{index}]"
        self.lines[path] = self.line(offset)
        return path

    def assignment(self, table: str | None, depth: int) -> None:
        path = table
        for part, offset in self.key():
            path = self.note(path, part, offset)
        self.expect("=")
        self.skip(_BLANK)
        self.value(path, depth)

    def value(self, path: str | None, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise NestingError(self.line(self.at))
        opening = self.text[self.at : self.at + 1]
        if opening == "[":
            self.array(path, depth + 1)
        elif opening == "{":
            self.inline_table(path, depth + 1)
        elif opening in ('"', "'"):
            self.take(_STRING)
        else:
            self.take(_SCALAR)

    def array(self, path: str | None, depth: int) -> None:
        self.at += 1
        index = 0
        self.skip(_TRIVIA)
        while not self.text.startswith("]", self.at):
            element = None if path is None else f"{path}[{index}]"
            if element is not None:
                self.lines.setdefault(element, self.line(self.at))
            self.value(element, depth)
            index += 1
            self.skip(_TRIVIA)
            if self.text.startswith(",", self.at):
                self.at += 1
                self.skip(_TRIVIA)
            elif not self.text.startswith("]", self.at):
                raise _Stop
        self.at += 1

    def inline_table(self, path: str | None, depth: int) -> None:
        # Newlines and a last comma are TOML 1.1; which of them may stand here is tomllib's to say.
        self.at += 1
        self.skip(_TRIVIA)
        while not self.text.startswith("}", self.at):
            self.assignment(path, depth)
            self.skip(_TRIVIA)
            if self.text.startswith(",", self.at):
                self.at += 1
                self.skip(_TRIVIA)
            elif not self.text.startswith("}", self.at):
                raise _Stop
        self.at += 1

    def key(self) -> list[tuple[str, int]]:
        """Read a dotted key; return its parts and where each begins."""
        parts = []
        while True:
            self.skip(_BLANK)
            begin = self.at
            if self.text[self.at : self.at + 1] in ('"', "'"):
                parts.append((_unquoted(self.take(_QUOTED)), begin))
            else:
                parts.append((self.take(_BARE), begin))
            if len(parts) > _MAX_PARTS:
                raise NestingError(self.line(begin))
            self.skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return parts
            self.at += 1

    def note(self, path: str | None, part: str, offset: int) -> str | None:
        """Note key ``part``. No absurdly long path is noted: many would fill the memory."""
        if path is None or len(path) + len(part) > _MAX_PATH:
            return None
        path = join_key(path, part)
        self.lines.setdefault(path, self.line(offset))
        return path

    def line(self, offset: int) -> int:
        return bisect.bisect_left(self.newlines, offset) + 1

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise _Stop
        self.at = match.end()
        return match.group()

    def expect(self, token: str) -> None:
        self.skip(_BLANK)
        if not self.text.startswith(token, self.at):
            raise _Stop
        self.at += len(token)


def _unquoted(token: str) -> str:
    if token.startswith("'") or "\\" not in token:
        return token[1:-1]
    try:
        return str(tomllib.loads(f"key = {token}")["key"])
    except ValueError as error:
        raise _Stop from error
