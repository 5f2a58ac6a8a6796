"""An image's configuration: how it wants to be run, and the digests of its layers.

Formats: OCI image-spec v1.1 (``config.md``) and Docker's image specification v1.2, which is the
same where it matters here.
"""

from typing import NoReturn

from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import BuildError, VerificationError
from smolbuild.core.values import dataclass
from smolbuild.model.oci import parse_json_object

__all__ = ["ARCHITECTURE", "MAX_CONFIG_BYTES", "ImageConfig", "parse_config"]

ARCHITECTURE = "amd64"
"""The only architecture whose guests smolbuild boots."""

MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What an image says of how it wants to be run."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    architecture: str = ARCHITECTURE
    os: str = "linux"


def parse_config(data: bytes, what: str) -> tuple[ImageConfig, tuple[Digest, ...]]:
    """Return the run configuration and the diff ids of an image configuration's bytes.

    Raises:
        VerificationError: it is malformed.
        BuildError: it is for another operating system or architecture.

    """
    value = parse_json_object(data, what, limit=MAX_CONFIG_BYTES)
    inner = value.get("config") or {}
    rootfs = value.get("rootfs") or {}
    if not isinstance(inner, dict) or not isinstance(rootfs, dict):
        _bad(what, "config or rootfs is not an object")
    config = ImageConfig(
        env=_env(_texts(inner, "Env", what)),
        workdir=_text(inner, "WorkingDir", what),
        user=_text(inner, "User", what),
        entrypoint=_texts(inner, "Entrypoint", what),
        cmd=_texts(inner, "Cmd", what),
        architecture=_text(value, "architecture", what) or ARCHITECTURE,
        os=_text(value, "os", what) or "linux",
    )
    if (config.os, config.architecture) != ("linux", ARCHITECTURE):
        raise BuildError(
            f"{what} is for {config.os}/{config.architecture}; "
            f"smolbuild builds machines for linux/{ARCHITECTURE}",
            hint=f"use an image for linux/{ARCHITECTURE}",
            code="platform",
        )
    try:
        return config, tuple(parse_digest(text) for text in _texts(rootfs, "diff_ids", what))
    except ValueError as error:
        raise VerificationError(f"{what}: {error}", code="malformed") from error


def _env(entries: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if name:
            pairs[name] = value
    return tuple(pairs.items())


def _text(value: dict[str, object], key: str, what: str) -> str:
    text = value.get(key) or ""
    if not isinstance(text, str):
        _bad(what, f"{key} is not a string")
    return text


def _texts(value: dict[str, object], key: str, what: str) -> tuple[str, ...]:
    texts = value.get(key) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        _bad(what, f"{key} is not a list of strings")
    return tuple(texts)


def _bad(what: str, problem: str) -> NoReturn:
    raise VerificationError(f"{what}: {problem}", code="malformed")
