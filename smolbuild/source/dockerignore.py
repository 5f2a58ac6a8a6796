"""``.dockerignore``: what of a directory is not sent to a Docker engine.

The rules are Docker's (``moby/patternmatcher``), which differ from those of ``.smolbuildignore``:
every pattern is tied to the context's root, one that names a directory covers all below it, and a
later ``!`` may take in again what lies below a directory that is left out.
"""

import posixpath
import re
from collections.abc import Iterable

from smolbuild.core.values import dataclass

__all__ = ["DockerIgnore", "parse_dockerignore"]


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    takes_in: bool
    text: str


@dataclass(frozen=True, slots=True)
class DockerIgnore:
    """Ordered rules; the last that matches a path or a directory above it decides."""

    rules: tuple[_Rule, ...]

    def leaves_out(self, path: str) -> bool:
        """Return whether ``path``, relative to the context, is left out."""
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
        for rule in reversed(self.rules):
            if any(rule.pattern.fullmatch(name) for name in above):
                return not rule.takes_in
        return False

    def takes_in_below(self, directory: str) -> bool:
        """Return whether something below a directory that is left out may come in again.

        Docker looks there only when a ``!`` pattern begins with the directory's name, letter by
        letter: ``!*/a`` brings nothing back.
        """
        return any(
            rule.takes_in and f"{rule.text}/".startswith(f"{directory}/") for rule in self.rules
        )


def parse_dockerignore(lines: Iterable[str]) -> DockerIgnore:
    """Return the rules of the lines of a ``.dockerignore``.

    Raises:
        ValueError: a pattern is malformed; says which.

    """
    rules = []
    for line in lines:
        text = line.removeprefix("\ufeff")
        if text.startswith("#"):
            continue
        text = text.strip()
        takes_in = text.startswith("!")
        text = text.removeprefix("!").strip()
        if not text:
            continue
        text = posixpath.normpath(text)
        if len(text) > 1:
            text = text.lstrip("/")
        try:
            pattern = re.compile(_translate(text), re.DOTALL)
        except re.error as error:
            raise ValueError(f"the pattern {line.strip()!r} is malformed: {error}") from error
        rules.append(_Rule(pattern, takes_in, text))
    return DockerIgnore(tuple(rules))


def _translate(text: str) -> str:
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "*" and text[at : at + 1] == "*":
            at += 1
            at += text[at : at + 1] == "/"
            out.append(".*" if at == len(text) else "(?:.*/)?")
        elif char == "*":
            out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[" and (end := text.find("]", at + 1)) > 0:
            members = text[at:end].replace("[", r"\[")
            out.append(f"[{members}]")
            at = end + 1
        elif char == "\\" and at < len(text):
            out.append(re.escape(text[at]))
            at += 1
        else:
            out.append(re.escape(char))
    return "".join(out)
