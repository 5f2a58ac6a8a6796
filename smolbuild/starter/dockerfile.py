"""Reads Dockerfiles into instructions: continuations, comments, directives, here-documents.

The format is Docker's "Dockerfile reference". Written here because what a translation needs is
small, and dockerfile-parse, the usual library, knows neither here-documents nor flags.
"""

import json
import re
from collections.abc import Iterator, Mapping

from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass

__all__ = ["Instruction", "expand", "parse_dockerfile", "read_list", "split_words"]

_KEYWORD = re.compile(r"\s*(\S+?)(?:\s|\\\n|$)(?:\s|\\\n)*(.*)", re.DOTALL)
_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+?)\s*")
_HEREDOC = re.compile(r"(?<!<)<<(-?)([\"']?)([a-zA-Z_][a-zA-Z0-9_]*)\2(?!<)")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s|\\\n)*")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?::([-+])([^}}]*))?\}})")
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
_WITH_FLAGS = ("FROM", "RUN", "COPY", "ADD", "HEALTHCHECK")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction; ``text`` is what follows keyword and flags, continuations joined."""

    keyword: str
    """Upper case."""
    text: str
    script: str
    """As ``text``, with continuations as a shell takes them: a backslash before each line end."""
    line: int
    """1-based, of its first line."""
    flags: Mapping[str, str]
    heredocs: tuple[str, ...] = ()
    """Bodies of here-documents, in order."""
    source: str = ""
    """As it stands in the file, here-documents too."""


def parse_dockerfile(text: str, *, file: str) -> tuple[Instruction, ...]:
    """Return the instructions of a Dockerfile, in order; what they say is not judged.

    Raises:
        UsageError: too long, a here-document without an end, or no instruction at all.

    """
    if len(text) > _MAX_BYTES:
        raise _bad(file, 0, f"more than {_MAX_BYTES:,} characters")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    found = tuple(_instructions(lines, _escape(lines), file))
    if not found:
        raise _bad(file, 0, "there is no instruction in it")
    return found


def read_list(text: str) -> tuple[str, ...] | None:
    """Return the exec form (a JSON list of strings) of an instruction, or None: shell form."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    return tuple(value)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return ``text`` with ``$NAME``, ``${NAME}``, ``${NAME:-…}`` and ``${NAME:+…}`` replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        known = variables.get(name, "")
        if match[3] == "-":
            return known or match[4]
        if match[3] == "+":
            return match[4] if known else ""
        return known

    return "\\$".join(_VARIABLE.sub(value, part) for part in text.split("\\$"))


def split_words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words of ``text``: quotes and backslashes taken off, variables replaced.

    Nothing is replaced in single quotes, as in a shell.
    """
    words: list[str] = []
    word: list[str] | None = None
    for part in re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|\s+|[^\s'\"\\]+|.", text, re.DOTALL):
        if part.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if len(part) > 1 and part[0] == part[-1] == "'":
            word.append(part[1:-1])
        elif len(part) > 1 and part[0] == part[-1] == '"':
            inner = re.sub(r'\\(["\\])', r"\1", part[1:-1])
            word.append(expand(inner, variables).replace("\\$", "$"))
        elif part[0] == "\\" and len(part) > 1:
            word.append(part[1])
        else:
            word.append(expand(part, variables))
    if word is not None:
        words.append("".join(word))
    return words


def _escape(lines: list[str]) -> str:
    for line in lines:
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        if match[1].lower() == "escape" and match[2] in ("`", "\\"):
            return match[2]
    return "\\"


def _instructions(lines: list[str], escape: str, file: str) -> Iterator[Instruction]:
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].lstrip().startswith("#"):
            at += 1
            continue
        first = at
        parts: list[str] = []
        while at < len(lines):
            line = lines[at]
            at += 1
            if parts and (line.lstrip().startswith("#") or not line.strip()):
                continue  # inside a continuation, comments and empty lines are passed over
            kept = line.rstrip()
            if not kept.endswith(escape) or kept.endswith(2 * escape):  # as BuildKit has it
                parts.append(line)
                break
            parts.append(kept[: -len(escape)])
        match = _KEYWORD.match("\\\n".join(parts))
        keyword, rest = (match[1].upper(), match[2]) if match else ("", "")
        flags: dict[str, str] = {}
        if keyword in _WITH_FLAGS:
            flags, rest = _flags(rest)
        joined = rest.replace("\\\n", "").strip()
        bodies: list[str] = []
        if keyword in _WITH_HEREDOCS and read_list(joined) is None:
            for dash, _, name in _HEREDOC.findall(joined):
                body, at = _heredoc(lines, at, name, strip=bool(dash), file=file, line=first + 1)
                bodies.append(body)
        yield Instruction(
            keyword=keyword,
            text=joined,
            script=rest.strip(),
            line=first + 1,
            flags=flags,
            heredocs=tuple(bodies),
            source="\n".join(lines[first:at]).strip(),
        )


def _heredoc(
    lines: list[str], at: int, name: str, *, strip: bool, file: str, line: int
) -> tuple[str, int]:
    body: list[str] = []
    for number in range(at, len(lines)):
        text = lines[number].lstrip("\t") if strip else lines[number]
        if text == name:
            return "".join(f"{row}\n" for row in body), number + 1
        body.append(text)
    raise _bad(file, line, f"the here-document {name} has no end")


def _flags(text: str) -> tuple[dict[str, str], str]:
    flags: dict[str, str] = {}
    while match := _FLAG.match(text):
        flags[match[1]] = match[2] or ""
        text = text[match.end() :]
    return flags, text


def _bad(file: str, line: int, problem: str) -> UsageError:
    where = f"{file}:{line}" if line else file
    return UsageError(f"{where}: {problem}", code="dockerfile")
