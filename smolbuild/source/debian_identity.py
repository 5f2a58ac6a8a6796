"""What identifies a Debian root: known from the lock alone, so that a plan installs nothing."""

from smolbuild.core.digest import Digest, digest_value
from smolbuild.model.lock import LockedDebian
from smolbuild.model.smolfile import Base

__all__ = ["NORMALISATION", "debian_digest"]

NORMALISATION = 1
"""Part of the digest; raised whenever ``source.debian`` or ``source.debian_clean`` would make
another root of the same packages."""


def debian_digest(base: Base, lock: LockedDebian) -> Digest:
    """Return what identifies the root in the provenance key; known from the lock alone."""
    return digest_value(
        "smolbuild.debian.v1",
        {
            "suite": lock.suite,
            "variant": lock.variant,
            "components": list(lock.components),
            "architecture": lock.architecture,
            "mirror": base.archive,
            "requested": sorted(lock.requested),
            "packages": sorted(
                [package.name, package.version, package.architecture, package.sha256]
                for package in lock.packages
            ),
            "normalisation": NORMALISATION,
        },
    )
