"""Which programs of the host there are; nothing is started here (see ``core.process``)."""

import os
from collections.abc import Mapping

from smolbuild.core.errors import HostError

__all__ = ["PACKAGES", "find_program"]

PACKAGES: Mapping[str, str] = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "musl-gcc": "musl-tools gcc",
    "apt-get": "apt",
    "apt-cache": "apt",
    "dpkg-deb": "dpkg",
    "docker-registry": "docker-registry",
}
"""Debian package that brings each program, for the hint of a missing one."""


def find_program(name: str) -> str:
    """Return the absolute path of program ``name``.

    Raises:
        HostError: it is not installed; names the Debian package that brings it.

    """
    path = _which(name)
    if path is None:
        package = PACKAGES.get(name, name)
        raise HostError(
            f"the program {name} is not installed",
            hint=f"on Debian or Ubuntu: apt-get install {package}",
            code="missing-program",
        )
    return path


def _which(name: str) -> str | None:
    """Return what ``shutil.which`` would; that module's import alone costs more than a plan's."""
    if "/" in name:
        return name if _is_program(name) else None
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, name)  # noqa: PTH118 - as PATH says it
        if _is_program(path):
            return path
    return None


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)  # noqa: PTH113
