"""What two locks of one Smolfile differ in, as sentences."""

from collections.abc import Iterator, Mapping

from smolbuild.model.lock import Lock, LockedDebian

__all__ = ["lock_changes"]

_NAMED = 6
_DIGITS = 19


def lock_changes(old: Lock, new: Lock) -> tuple[str, ...]:
    """Return what ``new`` has otherwise than ``old``, one sentence each; empty when nothing."""
    return tuple(_changes(old, new))


def _changes(old: Lock, new: Lock) -> Iterator[str]:
    if old.image and new.image and old.image != new.image:
        before, after = old.image, new.image
        digests = (before.digest, after.digest)
        if before.digest == after.digest:
            digests = (before.platform_digest, after.platform_digest)
        had, has = (digest[:_DIGITS] for digest in digests)
        yield f"{after.reference} now names {has}, the lock has {had}"
    if old.debian and new.debian:
        yield from _debian(old.debian, new.debian)
    if old.kernel and new.kernel and old.kernel != new.kernel:
        was, now = (f"{kernel.package} {kernel.version}" for kernel in (old.kernel, new.kernel))
        yield f"kernel: {was} -> {now}"


def _debian(old: LockedDebian, new: LockedDebian) -> Iterator[str]:
    before, after = _versions(old), _versions(new)
    changed = [
        f"{name} {before[name][0]} -> {after[name][0]}"
        for name in after
        if name in before and before[name] != after[name]
    ]
    for what, names in (
        ("with another version", changed),
        ("more", [name for name in after if name not in before]),
        ("fewer", [name for name in before if name not in after]),
    ):
        if names:
            rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            count = f"{len(names)} {'package' if len(names) == 1 else 'packages'}"
            yield f"Debian {new.suite}: {count} {what}: {', '.join(names[:_NAMED])}{rest}"


def _versions(debian: LockedDebian) -> Mapping[str, tuple[str, str]]:
    return {package.name: (package.version, package.sha256) for package in debian.packages}
