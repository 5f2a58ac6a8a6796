"""Image and artifact references: ``host[:port]/name[:tag][@sha256:…]`` and Docker short names.

The grammar is that of the distribution project (``distribution/reference``) and of the OCI
distribution specification; a short name is expanded as Docker does it.
"""

import ipaddress
import re
from dataclasses import replace

from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass

__all__ = [
    "DEFAULT_TAG",
    "DOCKER_HUB",
    "Reference",
    "artifact_name",
    "is_loopback",
    "local_name",
    "parse_reference",
    "parse_repository",
]

DOCKER_HUB = "docker.io"
DEFAULT_TAG = "latest"

_HOST = re.compile(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?"
)
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MAX_NAME = 255
_MAX_TEXT = 600
_EXAMPLES = "registry.example.com/team/name:tag, localhost:5000/name@sha256:…, debian:bookworm-slim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A repository in a registry, with a tag, a digest or both; always valid.

    When both are given the digest decides, and the tag is only a note of what it once was.

    Raises:
        UsageError: a part does not follow the grammar.

    """

    registry: str
    """Host and optional port; ``docker.io`` for Docker Hub, whatever host serves its API."""
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.registry) or not _valid_port(self.registry):
            raise _bad(str(self), f"{self.registry[:80]!r} is not a registry host")
        if not _REPOSITORY.fullmatch(self.repository):
            raise _bad(str(self), _why_not_a_repository(self.repository))
        if len(self.registry) + 1 + len(self.repository) > _MAX_NAME:
            raise _bad(str(self), f"the name has more than {_MAX_NAME} characters")
        if self.tag is not None and not _TAG.fullmatch(self.tag):
            raise _bad(
                str(self),
                f"{self.tag[:80]!r} is not a tag: 1 to 128 letters, digits, '_', '.' or '-', "
                "not starting with '.' or '-'",
            )
        if self.digest is not None:
            try:
                parse_digest(self.digest)
            except ValueError as error:
                raise _bad(str(self), str(error)) from error

    def __str__(self) -> str:
        """Render in full; ``parse_reference`` gives the same value back."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"

    @property
    def name(self) -> str:
        """Registry and repository without tag and digest: what a signature claims."""
        return f"{self.registry}/{self.repository}"

    @property
    def locator(self) -> str:
        """What a registry is asked for: the digest when there is one, else the tag."""
        return self.digest or self.tag or DEFAULT_TAG

    def at(self, digest: Digest) -> "Reference":
        """Return this reference pinned to ``digest``."""
        return replace(self, digest=digest)

    def tagged(self, tag: str) -> "Reference":
        """Return this reference with ``tag`` and without a digest."""
        return replace(self, tag=tag, digest=None)


def parse_reference(text: str) -> Reference:
    """Parse a full or short reference; without tag and digest the tag is ``latest``.

    Raises:
        UsageError: it does not follow the grammar; says which part, and shows examples.

    """
    if len(text) > _MAX_TEXT:
        raise _bad(text[:80] + "…", "it is too long")
    if "://" in text:
        raise _bad(text, "a reference has no scheme: leave out everything up to '://'")
    name, at, digest_text = text.partition("@")
    digest = None
    if at and not digest_text.startswith("sha256:"):
        raise _bad(text, "what follows '@' is not a sha256 digest; it takes no user or password")
    if at:
        try:
            digest = parse_digest(digest_text)
        except ValueError as error:
            raise _bad(text, str(error)) from error
    head, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not tag:
        raise _bad(text, "the tag after ':' is missing")
    registry, repository = _split(head + slash + last)
    if not repository:
        raise _bad(text, "the name is missing")
    if not colon and not at:
        tag = DEFAULT_TAG
    return Reference(registry=registry, repository=repository, tag=tag or None, digest=digest)


def parse_repository(text: str) -> Reference:
    """Parse the name of a repository: a reference without tag and digest.

    Raises:
        UsageError: it does not follow the grammar, or has a tag or a digest.

    """
    parsed = parse_reference(text)
    if parsed.digest is not None or ":" in text.rpartition("/")[2]:
        raise _bad(text, "it names a repository, so it takes no tag and no digest")
    return replace(parsed, tag=None)


def local_name(text: str) -> str:
    """Return ``NAME:TAG`` for a name in the local store; without a tag it is ``latest``.

    NAME may be a repository with or without its registry, so that what was pulled can be named so.

    Raises:
        UsageError: it does not follow the grammar of references, or has a digest.

    """
    head, slash, last = text.rpartition("/")
    last, colon, tag = last.partition(":")
    name, tag = head + slash + last, tag if colon else DEFAULT_TAG
    first, _, rest = name.partition("/")
    well = _REPOSITORY.fullmatch(name) or (_HOST.fullmatch(first) and _REPOSITORY.fullmatch(rest))
    if not well or not _TAG.fullmatch(tag) or len(name) > _MAX_NAME:
        shown = "".join(char if char.isprintable() else "·" for char in text[:80])
        raise UsageError(
            f"{shown!r} is no name for an artifact",
            hint="use NAME or NAME:TAG: lower-case letters and digits in parts, joined by '/', "
            "inside a part by '.', '_' or '-'",
            code="name",
        )
    return f"{name}:{tag}"


def artifact_name(text: str) -> str:
    """Return the nearest valid name to ``text`` (a directory's name), or ``machine``."""
    parts = re.findall(r"[a-z0-9]+", text.lower(), re.ASCII)
    return "-".join(parts)[:_MAX_NAME].strip("-") or "machine"


def is_loopback(registry: str) -> bool:
    """Return whether ``registry`` (host and optional port) is this machine's loopback interface."""
    host = registry if registry.endswith("]") else registry.rpartition(":")[0] or registry
    host = host.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    is_host = slash and (
        "." in first or ":" in first or first == "localhost" or first != first.lower()
    )
    registry, repository = (first, rest) if is_host else (DOCKER_HUB, name)
    if registry in {"index.docker.io", "registry-1.docker.io"}:
        registry = DOCKER_HUB
    if registry == DOCKER_HUB and repository and "/" not in repository:
        repository = f"library/{repository}"
    return registry, repository


def _valid_port(registry: str) -> bool:
    if registry.startswith("["):
        host, _, port = registry[1:].partition("]")
        port = port.removeprefix(":")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return False
    else:
        port = registry.partition(":")[2]
    return not port or 0 < int(port) < 65536


def _why_not_a_repository(repository: str) -> str:
    if repository != repository.lower():
        return f"the name {repository[:80]!r} has upper-case letters; only lower case is allowed"
    return (
        f"{repository[:80]!r} is not a name: lower-case letters and digits in parts, "
        "joined by '/', inside a part by '.', '_', '__' or '-'"
    )


def _bad(text: str, problem: str) -> UsageError:
    # Who takes a reference for a URL may write a password into it: never repeat that.
    shown = re.sub(r"[^/@\s]*:[^/@\s]*@(?!sha256:)", "…@", text[:200])
    return UsageError(
        f"{shown!r} is not a valid reference: {problem}",
        hint=f"write it like {_EXAMPLES}",
        code="reference",
    )
