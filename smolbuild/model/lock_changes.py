"""What two locks of one Smolfile differ in, as sentences."""

from collections.abc import Iterator, Mapping

from smolbuild.model.lock import Lock, LockedDebian
from smolbuild.model.packages import compare_packages, package_counts

__all__ = ["lock_changes"]

_NAMED = 6
_DIGITS = 19


def lock_changes(old: Lock, new: Lock) -> tuple[str, ...]:
    """Return what ``new`` has otherwise than ``old``, one sentence each; empty when nothing."""
    return tuple(_changes(old, new))


def _changes(old: Lock, new: Lock) -> Iterator[str]:
    if old.image and new.image:
        before, after = old.image, new.image
        digests = (before.digest, after.digest)
        if before.digest == after.digest:
            digests = (before.platform_digest, after.platform_digest)
        had, has = digests
        if had != has:
            yield f"{after.reference} now names {has[:_DIGITS]}, the lock has {had[:_DIGITS]}"
    if old.debian and new.debian:
        yield from _debian(old.debian, new.debian)
    if old.kernel and new.kernel and old.kernel != new.kernel:
        was, now = (f"{kernel.package} {kernel.version}" for kernel in (old.kernel, new.kernel))
        yield f"kernel: {was} -> {now}"


def _debian(old: LockedDebian, new: LockedDebian) -> Iterator[str]:
    changes = compare_packages(_versions(old), _versions(new))
    if changes:
        rest = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
        named = ", ".join(str(change) for change in changes[:_NAMED])
        yield f"Debian {new.suite}: {package_counts(changes)}: {named}{rest}"
    elif old.packages != new.packages:
        yield f"Debian {new.suite}: other files of the same versions"


def _versions(debian: LockedDebian) -> Mapping[str, str]:
    return {package.name: package.version for package in debian.packages}
