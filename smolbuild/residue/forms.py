"""How a secret may look in bytes: as it is, and as programs encode it."""

import base64
import json
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MIN_SECRET", "Form", "forms_of"]

MIN_SECRET = 8
"""Bytes below which a value cannot be told from chance, so that it cannot be searched for."""

_ESCAPE = re.compile(rb"%[0-9A-F]{2}")
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One encoding of a secret: ``data`` are the bytes that follow from the secret alone.

    Not shown: neither ``repr`` nor ``str`` tells the bytes.
    """

    encoding: str
    data: bytes

    def __repr__(self) -> str:
        return f"Form(encoding={self.encoding!r}, {len(self.data)} bytes)"


def forms_of(value: bytes | bytearray) -> tuple[Form, ...]:
    """Return the forms of ``value``, white space at its ends left out; no two have equal bytes.

    Base64 depends on where in what was encoded the value began, so there are three alignments, of
    which the characters that the value shares with its neighbours are left out. UTF-16 text of
    either byte order holds the same bytes but for the first or last.
    """
    core = bytes(value).strip()
    seen: dict[bytes, Form] = {}
    for encoding, data in _encodings(core):
        seen.setdefault(data, Form(encoding=encoding, data=data))
    return tuple(seen.values())


def _encodings(core: bytes) -> Iterator[tuple[str, bytes]]:
    yield "raw", core
    for shift in range(3):
        whole = base64.b64encode(bytes(shift) + core)
        data = whole[-(-shift * 8 // 6) : (shift + len(core)) * 8 // 6]
        yield "base64", data
        yield "base64url", data.translate(_URL_SAFE)
    for quoted in (
        urllib.parse.quote(core, safe=b""),
        urllib.parse.quote(core, safe=b"/"),
        urllib.parse.quote_plus(core, safe=b""),
    ):
        upper = quoted.encode()
        yield "URL", upper
        yield "URL", _ESCAPE.sub(lambda escape: escape[0].lower(), upper)
    yield "hex", core.hex().encode()
    yield "hex", core.hex().upper().encode()
    try:
        text = core.decode()
    except UnicodeDecodeError:
        return
    yield "UTF-16", text.encode("utf-16-le").removesuffix(b"\0")
    yield "UTF-16", text.encode("utf-16-be").removeprefix(b"\0")
    yield "JSON", json.dumps(text)[1:-1].encode()
    yield "JSON", json.dumps(text, ensure_ascii=False)[1:-1].encode()
