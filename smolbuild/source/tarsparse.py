"""The maps of sparse files in tar archives (GNU tar manual, "Storing Sparse Files")."""

import re

from smolbuild.core.errors import BuildError
from smolbuild.source.content import Region

__all__ = ["gnu_map", "pax_1_0_map", "pax_map"]

Pairs = list[tuple[int, int]]
"""(offset in the file, length) of each run of data."""

_BLOCK = 512
_MAX_RUNS = 1_000_000


def gnu_map(region: Region, position: int, header: bytes) -> tuple[Pairs, int]:
    """Return the map of an old GNU sparse member and the position of its data.

    Raises:
        BuildError: the map is malformed, cut short or too long.

    """
    pairs: Pairs = []
    _gnu_runs(header, 386, 4, pairs)
    more = header[482]
    while more:
        if position + _BLOCK > region.length or len(pairs) > _MAX_RUNS:
            raise BuildError("the map of a sparse file is cut short or too long")
        block = region.backing.read(region.offset + position, _BLOCK)
        position += _BLOCK
        _gnu_runs(block, 0, 21, pairs)
        more = block[504]
    return pairs, position


def _gnu_runs(block: bytes, start: int, count: int, pairs: Pairs) -> None:
    for at in range(start, start + 24 * count, 24):
        if block[at] == 0:
            return
        pairs.append((_gnu_number(block[at : at + 12]), _gnu_number(block[at + 12 : at + 24])))


def _gnu_number(data: bytes) -> int:
    if data[0] == 0x80:
        return int.from_bytes(data[1:], "big")
    text = data.partition(b"\0")[0].strip(b" ")
    if not re.fullmatch(rb"[0-7]+", text):
        raise BuildError("the map of a sparse file is not made of numbers")
    return int(text, 8)


def pax_map(text: bytes | None, records: list[tuple[bytes, bytes]]) -> Pairs:
    """Return the map of pax sparse format 0.1 (``text``) or 0.0 (repeated ``records``).

    Raises:
        BuildError: the map is malformed.

    """
    if text is not None:
        values = text.split(b",") if text else []
    else:
        names = [key for key, _ in records]
        if names != [b"GNU.sparse.offset", b"GNU.sparse.numbytes"] * (len(names) // 2):
            raise BuildError("the map of a sparse file is out of order")
        values = [value for _, value in records]
    if len(values) % 2 or not all(value.isdigit() and len(value) < 20 for value in values):
        raise BuildError("the map of a sparse file is not made of pairs of numbers")
    numbers = [int(value) for value in values]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def pax_1_0_map(region: Region, position: int, size: int) -> tuple[Pairs, int]:
    """Return the map of pax sparse format 1.0, which stands before the data, and the data's place.

    Raises:
        BuildError: the map is malformed, cut short or too long.

    """
    numbers: list[int] = []
    wanted, text, at = 1, b"", position
    while len(numbers) < wanted:
        if at + _BLOCK > position + size:
            raise BuildError("the map of a sparse file is cut short")
        *lines, text = (text + region.backing.read(region.offset + at, _BLOCK)).split(b"\n")
        at += _BLOCK
        for line in lines:
            if len(numbers) >= wanted:
                break
            if not line.isdigit() or len(line) > 19:
                raise BuildError("the map of a sparse file is not made of numbers")
            numbers.append(int(line))
            if len(numbers) == 1:
                wanted = 1 + 2 * numbers[0]
                if numbers[0] > _MAX_RUNS:
                    raise BuildError(f"the map of a sparse file has {numbers[0]:,} runs")
        if len(text) > _BLOCK:
            raise BuildError("the map of a sparse file is not made of numbers")
    return list(zip(numbers[1::2], numbers[2::2], strict=True)), at
