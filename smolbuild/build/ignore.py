"""``.smolbuildignore``: what a copied directory leaves out.

One pattern a line, like git's: ``#`` begins a comment, ``!`` takes a path in again, a trailing
``/`` means directories only, a ``/`` at the front or in the middle ties the pattern to the
Smolfile's directory, ``*`` and ``?`` stay within one name, ``**`` crosses directories, ``[…]`` is a
set of characters. The last pattern that matches decides; below a directory that is left out nothing
can be taken in again. There is one such file, in the Smolfile's directory.
"""

import re
from collections.abc import Iterable

from smolbuild.core.values import dataclass

__all__ = ["IgnoreRules", "parse_ignore"]


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    takes_in: bool
    directories_only: bool


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """Ordered rules; the last that matches decides."""

    rules: tuple[_Rule, ...]

    def leaves_out(self, path: str, *, directory: bool) -> bool:
        """Return whether ``path``, relative to the Smolfile's directory, is left out."""
        for rule in reversed(self.rules):
            if (directory or not rule.directories_only) and rule.pattern.fullmatch(path):
                return not rule.takes_in
        return False


def parse_ignore(lines: Iterable[str]) -> IgnoreRules:
    """Return the rules of the lines of an ignore file. Every text is a valid one."""
    rules = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        takes_in = text.startswith("!")
        text = text.removeprefix("!").removeprefix("\\")
        directories_only = text.endswith("/")
        text = text.rstrip("/")
        tied = "/" in text
        text = text.lstrip("/")
        if text:
            head = "" if tied else "(?:.*/)?"
            pattern = re.compile(head + _translate(text), re.DOTALL)
            rules.append(_Rule(pattern, takes_in, directories_only))
    return IgnoreRules(tuple(rules))


def _translate(text: str) -> str:
    out: list[str] = []
    at = 0
    while at < len(text):
        if text.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 3
        elif text.startswith("**", at):
            out.append(".*")
            at += 2
        elif text[at] == "*":
            out.append("[^/]*")
            at += 1
        elif text[at] == "?":
            out.append("[^/]")
            at += 1
        elif text[at] == "[" and (closing := text.find("]", at + 2)) > 0:
            out.append(_character_set(text[at + 1 : closing]))
            at = closing + 1
        else:
            out.append(re.escape(text[at]))
            at += 1
    return "".join(out)


def _character_set(text: str) -> str:
    negated = text[:1] in ("!", "^") and len(text) > 1
    members = text[1:] if negated else text
    pieces = []
    at = 0
    while at < len(members):
        low, high = members[at], members[at]
        if members[at + 1 : at + 2] == "-" and at + 2 < len(members):
            high = members[at + 2]
            at += 2
        at += 1
        if low <= high:
            pieces.append(f"{re.escape(low)}-{re.escape(high)}")
    if not pieces:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{''.join(pieces)}]"
