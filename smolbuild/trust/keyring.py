"""The keys of a home: ``NAME.pem`` signs (0600), every ``*.pub`` is trusted."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from smolbuild.core.events import Emit, Message
from smolbuild.core.files import file_lock, write_atomic
from smolbuild.core.home import Home
from smolbuild.trust.keys import (
    PublicKey,
    Signer,
    generate_key,
    load_private_key,
    load_public_key,
)

__all__ = ["make_key", "obtain_signer", "signing_key", "trusted_keys"]

DEFAULT_KEY = "default"


def signing_key(home: Home, name: str = DEFAULT_KEY) -> Path:
    """Return where the signing key ``name`` of ``home`` is or would be (``NAME.pem``)."""
    return home.keys / f"{name}.pem"


def make_key(home: Home, name: str = DEFAULT_KEY) -> PublicKey:
    """Make the key pair ``NAME.pem`` (0600) and ``NAME.pub`` in ``home``.

    Raises:
        UsageError: the private key exists already.

    """
    path = signing_key(home, name)
    made = generate_key(path)
    _write_public(path, made)
    return made


def obtain_signer(home: Home, key: Path | None, emit: Emit) -> Signer:
    """Return the signer for ``key``, or the home's default key, made on first use.

    Raises:
        UsageError: the key is unreadable, of the wrong kind, or readable by others.

    """
    if key is not None:
        return load_private_key(key)
    path = signing_key(home)
    with file_lock(home.locks / "key", timeout=10, what="the signing key"):
        if not path.exists():
            made = make_key(home)
            emit(Message(level="info", text=f"made the signing key {path} ({made.fingerprint})"))
        signer = load_private_key(path)
        if not path.with_suffix(".pub").exists():  # killed between the two, or lost
            _write_public(path, signer.public)
    return signer


def _write_public(path: Path, public: PublicKey) -> None:
    write_atomic(path.with_suffix(".pub"), public.pem.encode(), mode=0o644)


def trusted_keys(home: Home, extra: Sequence[Path] = ()) -> Mapping[str, PublicKey]:
    """Return the public keys whose signatures are accepted, by their hint.

    They are ``extra`` where given, else every ``*.pub`` in the home's key directory.

    Raises:
        UsageError: a key file is unreadable or not a P-256 public key.

    """
    paths = list(extra) or sorted(home.keys.glob("*.pub"))
    keys = [load_public_key(path) for path in paths]
    return {key.hint: key for key in keys}
