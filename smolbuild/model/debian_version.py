"""The order of Debian package versions (Debian policy, section 5.6.12)."""

import re

__all__ = ["compare_versions"]

_PARTS = re.compile(r"(\D*)(\d*)", re.ASCII)


def compare_versions(one: str, two: str) -> int:
    """Return a negative number when ``one`` is older than ``two``, positive when newer, else 0.

    Every text has a place in this order: what is no version is compared by the same rules.
    """
    first, second = _split(one), _split(two)
    if first[0] != second[0]:
        return first[0] - second[0]
    return _compare(first[1], second[1]) or _compare(first[2], second[2])


def _split(version: str) -> tuple[int, str, str]:
    epoch, colon, rest = version.partition(":")
    if not (colon and epoch.isascii() and epoch.isdecimal()):
        epoch, rest = "0", version
    upstream, dash, revision = rest.rpartition("-")
    # No revision counts as revision 0.
    return int(epoch[:18]), upstream if dash else rest, revision if dash else "0"


def _compare(one: str, two: str) -> int:
    while one or two:
        (text, number), (other_text, other_number) = _head(one), _head(two)
        order = _compare_text(text, other_text)
        if order:
            return order
        digits, other_digits = number.lstrip("0"), other_number.lstrip("0")
        if digits != other_digits:
            if len(digits) != len(other_digits):
                return len(digits) - len(other_digits)
            return -1 if digits < other_digits else 1
        one, two = one[len(text) + len(number) :], two[len(other_text) + len(other_number) :]
    return 0


def _head(text: str) -> tuple[str, str]:
    found = _PARTS.match(text)
    return ("", "") if found is None else (found[1], found[2])


def _compare_text(one: str, two: str) -> int:
    for index in range(max(len(one), len(two))):
        order = _weight(one[index : index + 1]) - _weight(two[index : index + 1])
        if order:
            return order
    return 0


def _weight(char: str) -> int:
    """A tilde sorts before the end of the text, letters before everything else."""
    if not char:
        return 0
    if char == "~":
        return -1
    return ord(char) if char.isascii() and char.isalpha() else ord(char) + (1 << 21)
