"""Private keys and tokens that are known by their shape, whoever they belong to.

The shapes are the issuers' own: a fixed beginning and a body of known letters and length. What
documentation and test suites are full of (examples, runs of one letter, the bare BEGIN line) is
left out. JSON web tokens are not among them: too many are public.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

from smolbuild.residue.scanner import Needle

__all__ = ["REACH", "SHAPES", "Shape", "Token"]

REACH = 8192
"""Bytes after a find that ``Shape.token`` wants to see, where there are so many."""

_UPPER, _LOWER, _DIGIT = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz", b"0123456789"
_ALNUM = _UPPER + _LOWER + _DIGIT
_WORD = _ALNUM + b"_-"
_DIFFERENT = 10
"""Different letters in the body of a token that is one."""
_PRINTED = 16
_BODY = re.compile(rb"(?:\s|\\r|\\n)*((?:[A-Za-z0-9+/=]|\s|\\r|\\n)+)")
_HEADERS = re.compile(
    rb"(?:(?:\s|\\r|\\n)*(?:Proc-Type|DEK-Info|Comment|Version): [ -~]+?(?=\r|\n|\\n|\\r))+"
)
_SPACE = re.compile(rb"\s|\\r|\\n")
_OPENSSH = b"b3BlbnNzaC1rZXktdjE"
_DER = re.compile(rb"M[A-P]")
"""A DER sequence in base64: how every unencrypted and every PKCS #8 key begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A key or token that was found. The value is not part of it."""

    kind: str
    fingerprint: str
    """``sha256:`` and 16 hex digits of the digest of its value (of a key: of its beginning)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of token: what to search for, and what it must look like where it was found."""

    kind: str
    needle: Needle
    pattern: re.Pattern[bytes] | None = None
    """Of the whole token; None: a private key in PEM."""

    def token(self, before: bytes, after: bytes) -> Token | None:
        """Return the token at the beginning of ``after``; None when there is none."""
        if self.pattern is None:
            return _private_key(before, after)
        found = self.pattern.match(after)
        if found is None or (before and before[-1:] in _WORD):
            return None
        body = found[0][len(self.needle.data) :]
        if len(set(body)) < _DIFFERENT or b"EXAMPLE" in body:
            return None
        return Token(kind=self.kind, fingerprint=_fingerprint(found[0]))


def _fingerprint(value: bytes) -> str:
    return f"sha256:{hashlib.sha256(value).hexdigest()[:_PRINTED]}"


def _private_key(before: bytes, after: bytes) -> Token | None:
    """Parse a PEM key whose ``PRIVATE KEY-----`` begins ``after`` (RFC 7468, RFC 1421).

    As many letters of its body are told apart as every key has of its own, so that a key cut off by
    a border of memory is the same one.
    """
    begin = re.search(rb"-----BEGIN (?:[A-Z0-9]+ ){0,2}$", before[-48:])
    if begin is None:
        return None
    rest = after[len(_KEY) :]
    encrypted = _HEADERS.match(rest)
    body = _BODY.match(rest, encrypted.end() if encrypted else 0)
    if body is None:
        return None
    letters = _SPACE.sub(b"", body[1])
    openssh = letters.startswith(_OPENSSH)
    told = 128 if openssh else 64
    if len(letters) < told or len(set(letters[:told])) < _DIFFERENT:
        return None
    if not openssh and encrypted is None and not _DER.match(letters):
        return None
    try:
        base64.b64decode(letters[:told], validate=True)
    except binascii.Error:
        return None
    return Token(kind="private key", fingerprint=_fingerprint(letters[:told]))


_KEY = b"PRIVATE KEY-----"


def _shape(kind: str, start: bytes, letters: bytes, least: int, pattern: bytes = b"") -> Shape:
    """Return the shape of ``start`` and at least ``least`` letters, or as ``pattern`` says."""
    body = pattern or b"[%s]{%d,}" % (re.escape(letters), least)
    return Shape(
        kind=kind,
        needle=Needle(data=start, run=least, follow=letters),
        pattern=re.compile(re.escape(start) + body),
    )


def _exact(kind: str, start: bytes, letters: bytes, length: int) -> Shape:
    klass = re.escape(letters)
    return _shape(kind, start, letters, length, b"[%s]{%d}(?![%s])" % (klass, length, klass))


SHAPES: tuple[Shape, ...] = (
    Shape(kind="private key", needle=Needle(data=_KEY)),
    _exact("AWS access key", b"AKIA", _UPPER + b"234567", 16),
    _exact("AWS access key", b"ASIA", _UPPER + b"234567", 16),
    *(_exact("GitHub token", b"gh%c_" % kind, _ALNUM, 36) for kind in b"pousr"),
    _shape("GitHub token", b"github_pat_", _ALNUM + b"_", 80),
    _shape("GitLab token", b"glpat-", _WORD, 20),
    *(_shape("Slack token", b"xox%c-" % kind, _ALNUM + b"-", 24) for kind in b"abeoprs"),
    _shape("Stripe key", b"sk_live_", _ALNUM, 24),
    _shape("Stripe key", b"rk_live_", _ALNUM, 24),
    _exact("Google API key", b"AIza", _WORD, 35),
    _exact("npm token", b"npm_", _ALNUM, 36),
    _shape("PyPI token", b"pypi-AgE", _WORD, 50),
    _exact("Hugging Face token", b"hf_", _UPPER + _LOWER, 34),
    _shape("SendGrid key", b"SG.", _WORD, 22, rb"[\w-]{22}\.[\w-]{43}(?![\w-])"),
    _shape("DigitalOcean token", b"dop_v1_", b"0123456789abcdef", 64),
    _shape("Anthropic key", b"sk-ant-", _WORD, 40),
    _shape("OpenAI key", b"sk-proj-", _WORD, 40),
)
"""Every shape that is searched for."""
