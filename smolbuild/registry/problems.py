"""What a registry's refusal means to a user, and what to do about it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from smolbuild.core.errors import RegistryError, SmolbuildError, VerificationError
from smolbuild.registry.retry import CutError

__all__ = ["Refusal", "printable", "read_refusal", "refused", "unreachable", "wrong_bytes"]

_CODE = re.compile(r"[A-Z_]{1,64}")
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A registry's error answer: status, the specification's error codes, their messages."""

    status: int
    codes: tuple[str, ...] = ()
    text: str = ""


def printable(text: str, limit: int = _MAX_SHOWN) -> str:
    """Return foreign text on one line, without control characters, at most ``limit`` long."""
    line = "".join(char if char.isprintable() else " " for char in text[: 4 * limit])
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def read_refusal(status: int, body: bytes) -> Refusal:
    """Parse an error answer (distribution-spec "Error Codes"); anything unexpected is left out."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return Refusal(status=status)
    errors = value.get("errors") if isinstance(value, dict) else None
    listed = errors if isinstance(errors, list) else []
    entries = [entry for entry in listed if isinstance(entry, dict)]
    codes = [entry["code"] for entry in entries if isinstance(entry.get("code"), str)]
    texts = [entry["message"] for entry in entries if isinstance(entry.get("message"), str)]
    return Refusal(
        status=status,
        codes=tuple(code for code in codes if _CODE.fullmatch(code)),
        text=printable("; ".join(texts)),
    )


def refused(refusal: Refusal, *, registry: str, what: str) -> SmolbuildError:
    """Return the error for ``refusal``; ``what`` is what was tried, such as ``pull of x/y:1``."""
    said = f" ({refusal.text})" if refusal.text else ""
    status = refusal.status
    if "DIGEST_INVALID" in refusal.codes or "SIZE_INVALID" in refusal.codes:
        return VerificationError(
            f"{registry} received other bytes than their digest says: {what}{said}",
            hint="the local data or the connection is damaged; build or pull the artifact again",
            code="digest-mismatch",
        )
    if status == 401:
        return RegistryError(
            f"{registry} wants a login for the {what}{said}",
            hint=f"run `docker login {registry}` (or set DOCKER_CONFIG to a directory whose "
            "config.json has the credentials), then try again",
            code="unauthorized",
        )
    if status == 403:
        return RegistryError(
            f"{registry} does not allow the {what}{said}",
            hint="the account that is logged in has no right to do this; ask its owner for "
            "access, or log in as somebody else",
            code="denied",
        )
    if status == 404:
        return RegistryError(
            f"{registry} does not have it: {what}{said}",
            hint="check the name, the tag and the digest; for a private repository, log in first",
            code="name-unknown" if "NAME_UNKNOWN" in refusal.codes else "not-found",
        )
    if status == 429:
        return RegistryError(
            f"{registry} limits how often it is asked and refused the {what}{said}",
            hint="wait some minutes and run the command again; what was transferred is kept",
            code="rate-limited",
        )
    if status >= 500:
        return RegistryError(
            f"{registry} failed with status {status} during the {what}{said}",
            hint="the registry has a problem of its own; local data is intact, try again later",
            code="unavailable",
        )
    return RegistryError(
        f"{registry} refused the {what} with status {status}{said}",
        hint="check that the address is that of an OCI registry and the name is right",
        code="rejected",
    )


def unreachable(cut: CutError, *, registry: str, what: str) -> SmolbuildError:
    """Return the error for an exchange that was tried often enough and never went through."""
    if cut.status:
        return refused(Refusal(status=cut.status), registry=registry, what=what)
    return RegistryError(
        f"the {what} did not work: {registry}: {cut.reason}",
        hint="check that the registry runs and the network works; local data is intact, so the "
        "command can simply be run again",
        code="unreachable",
    )


def wrong_bytes(problem: str, *, registry: str, code: str) -> VerificationError:
    """Return the error for bytes that are not what was asked for."""
    return VerificationError(
        f"{registry}: {problem}",
        hint="nothing of it was kept; the registry or something before it alters content, so "
        "ask its owner before trying again",
        code=code,
    )


def header_digest(headers: Mapping[str, str]) -> str:
    """Return the registry's claim of the content's digest, or an empty string."""
    return headers.get("Docker-Content-Digest", "").strip()
