"""What an ``image`` string of a Smolfile stands for.

The rules are upstream's: it is local when it starts with ``/``, ``./`` or ``../`` or ends in
``.tar``, ``.tar.gz`` or ``.tgz`` (and ``.tar.zst`` here); everything else is an image in a
registry. A local layout or archive with several images takes a name or digest: ``./layout:tag``,
``./image.tar:name:tag``, ``./layout@sha256:…``. ``docker-daemon:NAME`` is an image in a Docker
engine.
"""

import re
from pathlib import Path
from typing import Literal

from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.reference import parse_reference

__all__ = ["EngineHeld", "ImageSource", "LocalImage", "RegistryImage", "select_image"]

_PREFIXES = ("/", "./", "../")
_DAEMON_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """An image in the host's file system; ``selector`` is a name, a digest or empty."""

    path: Path
    kind: Literal["layout", "archive", "rootfs"]
    selector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryImage:
    """An image in a registry, by a valid reference as the user wrote it."""

    reference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHeld:
    """An image in a Docker engine, by a name or an ID."""

    name: str


ImageSource = LocalImage | RegistryImage | EngineHeld


def select_image(image: str, directory: Path) -> ImageSource:
    """Return what ``image`` stands for; relative paths are below ``directory``, the Smolfile's.

    Raises:
        UsageError: a local path that does not exist or is no image, a malformed reference, or a
            source that smolbuild does not read.

    """
    if image.startswith("docker-daemon:"):
        name = image.removeprefix("docker-daemon:")
        if not _DAEMON_NAME.fullmatch(name):
            raise UsageError(
                f"image {image!r}: expected docker-daemon:NAME, a name as `docker images` shows it",
                hint="for example image = 'docker-daemon:acme/app:v1'",
                code="docker-daemon",
            )
        return EngineHeld(name=name)
    if image == "-":
        raise UsageError(
            "image '-': an image from standard input cannot be built twice",
            hint="write it to a file and name that: image = './image.tar'",
            code="image-stdin",
        )
    if image.startswith(_PREFIXES) or image.endswith(_ARCHIVES):
        return _local(image, directory)
    parse_reference(image)
    return RegistryImage(reference=image)


def _local(image: str, directory: Path) -> LocalImage:
    name, selector = _split(image, directory)
    path = directory / name
    if path.is_file():
        return LocalImage(path=path, kind="archive", selector=selector)
    if path.is_dir():
        if (path / "oci-layout").is_file() or (path / "index.json").is_file():
            return LocalImage(path=path, kind="layout", selector=selector)
        if selector:
            raise UsageError(
                f"image {image!r}: {path} is not an OCI layout, so there is nothing to choose",
                hint="leave out the name after the path",
                code="not-an-image",
            )
        return LocalImage(path=path, kind="rootfs", selector="")
    raise UsageError(
        f"image {image!r}: {path} does not exist",
        hint="a path is relative to the Smolfile's directory",
        code="missing-image",
    )


def _split(image: str, directory: Path) -> tuple[str, str]:
    """Split a selector off, at the first place that leaves an existing path."""
    if (directory / image).exists():
        return image, ""
    for at, char in enumerate(image):
        if char in ":@" and at and (directory / image[:at]).exists():
            return image[:at], image[at + 1 :]
    return image, ""
