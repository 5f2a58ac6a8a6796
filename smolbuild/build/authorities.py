"""Certificates that the guest trusts besides its own: read from this host, put in before step one.

What is read is only ever certificates (PEM, RFC 7468); each is one file in the guest, named after
its digest, so that neither a path of this host nor a file's name there enters the artifact.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.core.errors import Problem, SmolfileError
from smolbuild.core.values import dataclass
from smolbuild.model.smolfile import Smolfile

__all__ = ["Authority", "authority_env", "read_authorities"]

AUTHORITY_DIRECTORY = "/etc/smolbuild"
_LIMIT = 1 << 20
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----[ \t\r]*\n(.*?)-----END \1-----", re.DOTALL)
_CERTIFICATES = (b"CERTIFICATE", b"X509 CERTIFICATE", b"TRUSTED CERTIFICATE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """One certificate: its digest (of the DER bytes) and its PEM text in one clean form."""

    digest: Digest
    pem: bytes

    @property
    def name(self) -> str:
        """The name of its file in the guest."""
        return f"smolbuild-{hex_of(self.digest)[:16]}.crt"


def read_authorities(smolfile: Smolfile) -> tuple[Authority, ...]:
    """Return the certificates of ``network.ca_files``, each once, in the order of their digests.

    Raises:
        SmolfileError: a file is missing, is no PEM, holds no certificate or a private key; all of
            them, each with its line.

    """
    problems: list[Problem] = []
    found: dict[Digest, Authority] = {}
    for index, name in enumerate(smolfile.ca_files):
        try:
            found.update((one.digest, one) for one in _read(smolfile.path.parent / name))
        except _BadFile as error:
            key = f"network.ca_files[{index}]"
            file, line = smolfile.where(key)
            problems.append(
                Problem(file=file, line=line, key=key, message=f"{name} {error}", hint=error.hint)
            )
    if problems:
        raise SmolfileError(tuple(problems))
    return tuple(found[digest] for digest in sorted(found))


def authority_env(smolfile: Smolfile) -> tuple[tuple[str, str], ...]:
    """Return the variables for programs that bring their own list of authorities.

    What uses the system's (curl, git, apt, Go, Java's of distributions) needs none; programs with
    an OpenSSL or rustls of their own read the first, Python's requests and pip the second, Node.js
    the third.
    """
    if not smolfile.ca_files:
        return ()
    bundle = f"{AUTHORITY_DIRECTORY}/ca-bundle.pem"
    return (
        ("SSL_CERT_FILE", bundle),
        ("REQUESTS_CA_BUNDLE", bundle),
        ("NODE_EXTRA_CA_CERTS", f"{AUTHORITY_DIRECTORY}/ca-files.pem"),
    )


class _BadFile(Exception):  # noqa: N818 - becomes a Problem where the key is known
    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def _read(path: Path) -> Iterator[Authority]:
    try:
        if not path.is_file():
            raise _BadFile("is not a file of this host", "give the path of a PEM file")
        with path.open("rb") as stream:
            data = stream.read(_LIMIT + 1)
    except OSError as error:
        raise _BadFile(f"cannot be read: {error.strerror}") from error
    if len(data) > _LIMIT:
        raise _BadFile(f"is larger than {_LIMIT:,} bytes", "name the authorities that are needed")
    if b"PRIVATE KEY-----" in data:
        raise _BadFile(
            "holds a private key, which must not get into an artifact",
            "name a file with the certificate alone",
        )
    blocks = _BLOCK.findall(data)
    if len(blocks) != data.count(b"-----BEGIN "):
        raise _BadFile("is damaged: a block has no end")
    certificates = [body for label, body in blocks if label in _CERTIFICATES]
    if not certificates:
        hint = "convert it: openssl x509 -inform der -in FILE -out FILE.pem"
        raise _BadFile("holds no PEM certificate", hint if data[:1] == b"\x30" else "")
    for number, body in enumerate(certificates, 1):
        yield _certificate(body, number)


def _certificate(body: bytes, number: int) -> Authority:
    try:
        data = base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error as error:
        raise _BadFile(f"is damaged: certificate {number} is no base64") from error
    der = _sequence(data)
    if not der:
        raise _BadFile(f"is damaged: certificate {number} is cut short or none")
    text = base64.b64encode(der)
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    pem = b"\n".join((b"-----BEGIN CERTIFICATE-----", *lines, b"-----END CERTIFICATE-----", b""))
    return Authority(digest=digest_bytes(der), pem=pem)


def _sequence(data: bytes) -> bytes:
    """Return the DER sequence (X.690, 8.1) that ``data`` begins with; empty when it is not whole.

    OpenSSL's ``TRUSTED CERTIFICATE`` goes on after it, with what only OpenSSL reads.
    """
    if len(data) < 4 or data[0] != 0x30 or data[1] not in (0x81, 0x82, 0x83):
        return b""
    size = data[1] & 0x7F
    end = 2 + size + int.from_bytes(data[2 : 2 + size], "big")
    return data[:end] if end <= len(data) else b""
