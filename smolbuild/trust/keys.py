"""Signing keys: ECDSA on P-256 only, the one curve that every verifier of interest accepts.

Private keys are PKCS#8 PEM files with mode 0600, plain or encrypted; public keys are PEM
SubjectPublicKeyInfo (RFC 5280), as ``cosign verify --key`` and ``openssl dgst`` read them.
"""

import base64
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smolbuild.core.errors import UsageError
from smolbuild.core.files import fsync_directory

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = [
    "FileSigner",
    "PublicKey",
    "Signer",
    "generate_key",
    "key_hint",
    "load_private_key",
    "load_public_key",
    "parse_public_key",
]

_MAX_KEY_BYTES = 64 * 1024


def key_hint(spki: bytes) -> str:
    """Return the hint that selects a key in a Sigstore bundle: base64(SHA-256(SPKI DER))."""
    return base64.b64encode(hashlib.sha256(spki).digest()).decode()


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A P-256 public key, held as its SubjectPublicKeyInfo DER; made by the loaders here."""

    spki: bytes

    @property
    def hint(self) -> str:
        """What a bundle names this key by."""
        return key_hint(self.spki)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the SPKI DER as ``sha256:<hex>``, for people to compare."""
        return "sha256:" + hashlib.sha256(self.spki).hexdigest()

    @property
    def pem(self) -> str:
        """The key as PEM, as other tools read it."""
        body = base64.encodebytes(self.spki).decode().replace("\n", "")
        lines = "\n".join(body[i : i + 64] for i in range(0, len(body), 64))
        return f"-----BEGIN PUBLIC KEY-----\n{lines}\n-----END PUBLIC KEY-----\n"

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Return whether ``signature`` (ASN.1 DER, ECDSA, SHA-256) is this key's over ``data``."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_der_public_key

        key = load_der_public_key(self.spki)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        try:
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


class Signer(Protocol):
    """Something that signs: a key file here, a hardware key or a service elsewhere."""

    @property
    def public(self) -> PublicKey:
        """The public half, which verifiers trust."""

    def sign(self, data: bytes) -> bytes:
        """Return the ECDSA P-256 SHA-256 signature over ``data`` as ASN.1 DER."""


@dataclass(frozen=True, slots=True)
class FileSigner:
    """A ``Signer`` over a private key that was loaded from a file; the key is never shown."""

    public: PublicKey
    _key: "ec.EllipticCurvePrivateKey" = field(repr=False, compare=False)

    def sign(self, data: bytes) -> bytes:
        """Return the ECDSA P-256 SHA-256 signature over ``data`` as ASN.1 DER."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))


def generate_key(path: Path) -> PublicKey:
    """Make a new P-256 key in ``path`` (PKCS#8 PEM, mode 0600) and return its public half.

    The file appears whole or not at all, and an existing file is never replaced.

    Raises:
        UsageError: ``path`` exists (code ``key-exists``), or its directory cannot be written.

    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        _write_new(path, pem)
    except FileExistsError as error:
        raise UsageError(
            f"the key {path} exists already",
            hint="choose another name, or move the old key away; a lost key cannot be made again",
            code="key-exists",
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write the key {path}: {error.strerror}", code="key") from error
    return _public_of(key.public_key())


def load_private_key(path: Path, password: Callable[[], str] | None = None) -> FileSigner:
    """Load a P-256 private key from a PKCS#8 PEM file, plain or encrypted.

    Args:
        path: the file; group and others must have no access to it.
        password: asked at most once, and only when the key is encrypted.

    Raises:
        UsageError: missing file, too open permissions (``key-permissions``), missing or wrong
            password (``key-password``), another kind of key (``key-type``), or not a key (``key``).

    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pem = _read(path, private=True)
    encrypted = b"ENCRYPTED PRIVATE KEY" in pem
    if encrypted and password is None:
        raise UsageError(
            f"the key {path} is encrypted and no password was given", code="key-password"
        )
    secret = password().encode() if encrypted and password is not None else None
    try:
        key = load_pem_private_key(pem, secret)
    except UnsupportedAlgorithm as error:
        raise _wrong_kind(str(path)) from error
    except (ValueError, TypeError) as error:
        if encrypted:
            raise UsageError(
                f"the password for the key {path} is wrong, or the file is damaged",
                code="key-password",
            ) from error
        raise UsageError(
            f"{path} does not hold a private key in PKCS#8 PEM form",
            hint="make one with `smolbuild key generate`",
            code="key",
        ) from error
    return _signer(key, str(path))


def load_public_key(path: Path) -> PublicKey:
    """Load a P-256 public key from a PEM file.

    Raises:
        UsageError: the file cannot be read, or does not hold a P-256 public key.

    """
    return parse_public_key(_read(path, private=False), str(path))


def parse_public_key(pem: bytes, where: str = "public key") -> PublicKey:
    """Parse a P-256 public key in PEM form; ``where`` names it in errors.

    Raises:
        UsageError: it is not a PEM public key (``key``), or of another kind (``key-type``).

    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except UnsupportedAlgorithm as error:
        raise _wrong_kind(where) from error
    except (ValueError, TypeError) as error:
        what = "a private key; give the public one" if b"PRIVATE KEY" in pem else "no public key"
        raise UsageError(f"{where} holds {what}", code="key") from error
    return _checked_public(key, where)


def _signer(key: object, where: str) -> FileSigner:
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _wrong_kind(where)
    return FileSigner(_checked_public(key.public_key(), where), key)


def _checked_public(key: object, where: str) -> PublicKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _wrong_kind(where)
    return _public_of(key)


def _public_of(key: "ec.EllipticCurvePublicKey") -> PublicKey:
    from cryptography.hazmat.primitives import serialization

    return PublicKey(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def _wrong_kind(where: str) -> UsageError:
    return UsageError(
        f"{where} is not a P-256 key",
        hint="only ECDSA keys on the curve P-256 are used: `smolbuild key generate` makes one",
        code="key-type",
    )


def _read(path: Path, *, private: bool) -> bytes:
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if private and mode & 0o077:
                raise UsageError(
                    f"the private key {path} is open to others (mode {mode & 0o777:04o})",
                    hint=f"chmod 600 {path}",
                    code="key-permissions",
                )
            data = stream.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the key {path}: {error.strerror}",
            hint="make one with `smolbuild key generate`" if private else "",
            code="key",
        ) from error
    if len(data) > _MAX_KEY_BYTES:
        raise UsageError(f"{path} is too large to be a key", code="key")
    return data


def _write_new(path: Path, data: bytes) -> None:
    # A hard link, not a rename: it fails when the name is taken, so two runs never replace a key.
    descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)  # made with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        path.hardlink_to(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    fsync_directory(path.parent)
