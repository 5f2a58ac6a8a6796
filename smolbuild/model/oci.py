"""OCI descriptors, manifests and indexes as values (image-spec v1.1).

Parsing is strict where trust depends on it (digest, size, media type) and tolerant elsewhere:
unknown members are ignored, as the specification demands. The raw bytes stay the truth: digests are
always taken over them, never over a re-serialisation.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import field
from typing import NoReturn

from smolbuild.core.digest import Digest, digest_bytes, hex_of, parse_digest
from smolbuild.core.errors import VerificationError
from smolbuild.core.values import dataclass

__all__ = [
    "ARTIFACT_TYPE",
    "BUNDLE_TYPE",
    "CONFIG_TYPE",
    "DEVICE_STATE_TYPE",
    "DISK_CHUNK_TYPE",
    "DOCKER_LIST_TYPE",
    "DOCKER_MANIFEST_TYPE",
    "EMPTY",
    "EMPTY_TYPE",
    "INDEX_TYPE",
    "INITRD_TYPE",
    "KERNEL_TYPE",
    "MANIFEST_TYPE",
    "MAX_MANIFEST_BYTES",
    "MEMORY_CHUNK_TYPE",
    "Descriptor",
    "Index",
    "Manifest",
    "describe",
    "encode_json",
    "fallback_tag",
    "parse_index",
    "parse_json_object",
    "parse_manifest",
]

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"

ARTIFACT_TYPE = "application/vnd.smolbuild.machine.v1"
CONFIG_TYPE = "application/vnd.smolbuild.machine.config.v1+json"
DISK_CHUNK_TYPE = "application/vnd.smolbuild.disk.chunk.v1+zstd"
MEMORY_CHUNK_TYPE = "application/vnd.smolbuild.memory.chunk.v1+zstd"
DEVICE_STATE_TYPE = "application/vnd.smolbuild.device-state.v1+zstd"
KERNEL_TYPE = "application/vnd.smolbuild.kernel.v1"
INITRD_TYPE = "application/vnd.smolbuild.initrd.v1"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""Registries refuse more (docker-registry: 4 MiB), so readers do too."""
_MAX_CHILDREN = 100_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_GO_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What identifies a blob or manifest: type, digest, size in bytes."""

    media_type: str
    digest: Digest
    size: int
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of this descriptor; empty members are left out.

        Members come in the order of image-spec's Go types: skopeo writes an index anew when it
        copies one, and refuses where its bytes are not the ones it read.
        """
        value: dict[str, object] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
        }
        if self.annotations:
            value["annotations"] = dict(sorted(self.annotations.items()))
        if self.platform:
            value["platform"] = dict(self.platform)
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An image manifest, with the descriptor of its raw bytes."""

    descriptor: Descriptor
    artifact_type: str | None
    config: Descriptor
    layers: tuple[Descriptor, ...]
    subject: Descriptor | None
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An image index, with the descriptor of its raw bytes."""

    descriptor: Descriptor
    artifact_type: str | None
    manifests: tuple[Descriptor, ...]
    subject: Descriptor | None
    annotations: Mapping[str, str]


def describe(data: bytes, media_type: str) -> Descriptor:
    """Return the descriptor of ``data``."""
    return Descriptor(media_type=media_type, digest=digest_bytes(data), size=len(data))


def fallback_tag(subject: Digest) -> str:
    """Return the name of the index of ``subject``'s referrers where there is no referrers API."""
    return f"sha256-{hex_of(subject)}"


def encode_json(value: object) -> bytes:
    """Return the bytes we write for manifests, configs and statements: compact, keys as given.

    The characters that Go's encoder escapes are escaped, so that Go tools reproduce the bytes.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.translate(_GO_ESCAPES).encode()


def parse_json_object(
    data: bytes, what: str, *, limit: int = MAX_MANIFEST_BYTES
) -> dict[str, object]:
    """Parse bytes from outside as one JSON object.

    Raises:
        VerificationError: too long, not UTF-8 JSON, nested too deeply, or not an object.

    """
    if len(data) > limit:
        _bad(what, f"it has {len(data):,} bytes, more than the {limit:,} allowed")
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):  # half of a pair could never be written out again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"{what} is not JSON: {error}", code="malformed") from error
    if not isinstance(value, dict):
        _bad(what, "it is not a JSON object")
    return value


def parse_manifest(data: bytes, what: str = "manifest") -> Manifest:
    """Parse an OCI or Docker image manifest.

    Raises:
        VerificationError: it is malformed; says which member.

    """
    value = parse_json_object(data, what)
    media_type = _media_type(value, what, MANIFEST_TYPE, (MANIFEST_TYPE, DOCKER_MANIFEST_TYPE))
    if "config" not in value or "layers" not in value:
        _bad(what, "it has no config or layers: not an image manifest")
    return Manifest(
        descriptor=describe(data, media_type),
        artifact_type=_optional_text(value, "artifactType", what),
        config=parse_descriptor(value["config"], f"{what} config"),
        layers=_descriptors(value["layers"], f"{what} layers"),
        subject=_subject(value, what),
        annotations=_text_map(value.get("annotations"), f"{what} annotations"),
    )


def parse_index(data: bytes, what: str = "index") -> Index:
    """Parse an OCI image index or Docker manifest list.

    Raises:
        VerificationError: it is malformed; says which member.

    """
    value = parse_json_object(data, what)
    media_type = _media_type(value, what, INDEX_TYPE, (INDEX_TYPE, DOCKER_LIST_TYPE))
    return Index(
        descriptor=describe(data, media_type),
        artifact_type=_optional_text(value, "artifactType", what),
        manifests=_descriptors(value.get("manifests"), f"{what} manifests"),
        subject=_subject(value, what),
        annotations=_text_map(value.get("annotations"), f"{what} annotations"),
    )


def parse_descriptor(value: object, what: str) -> Descriptor:
    """Parse one descriptor object.

    Raises:
        VerificationError: a member is missing or malformed, the size negative.

    """
    if not isinstance(value, dict):
        _bad(what, "it is not an object")
    media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
    if not isinstance(media_type, str) or not media_type:
        _bad(what, "mediaType is missing")
    if not isinstance(digest, str):
        _bad(what, "digest is missing")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        _bad(what, "size is not a non-negative integer")
    try:
        parsed = parse_digest(digest)
    except ValueError as error:
        raise VerificationError(f"{what}: {error}", code="malformed") from error
    platform = value.get("platform")
    texts = (
        {k: v for k, v in platform.items() if isinstance(v, str)}
        if isinstance(platform, dict)
        else {}
    )
    return Descriptor(
        media_type=media_type,
        digest=parsed,
        size=size,
        artifact_type=_optional_text(value, "artifactType", what),
        annotations=_text_map(value.get("annotations"), f"{what} annotations"),
        platform=texts,
    )


def _subject(value: Mapping[str, object], what: str) -> Descriptor | None:
    subject = value.get("subject")
    return None if subject is None else parse_descriptor(subject, f"{what} subject")


def _media_type(
    value: Mapping[str, object], what: str, default: str, accepted: tuple[str, ...]
) -> str:
    if value.get("schemaVersion") != 2:
        _bad(what, "schemaVersion is not 2")
    media_type = value.get("mediaType", default)
    if media_type not in accepted:
        _bad(what, f"mediaType is {str(media_type)[:120]!r}")
    return str(media_type)


def _descriptors(value: object, what: str) -> tuple[Descriptor, ...]:
    if not isinstance(value, list):
        _bad(what, "it is not a list")
    if len(value) > _MAX_CHILDREN:
        _bad(what, f"it has {len(value):,} entries")
    return tuple(parse_descriptor(item, f"{what}[{i}]") for i, item in enumerate(value))


def _optional_text(value: Mapping[str, object], key: str, what: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        _bad(what, f"{key} is not a string")
    return text or None


def _text_map(value: object, what: str) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _bad(what, "it is not an object")
    for key, text in value.items():
        if not isinstance(text, str):
            _bad(what, f"{key!r} is not a string")
    return value


def _bad(what: str, problem: str) -> NoReturn:
    raise VerificationError(f"{what}: {problem}", code="malformed")
