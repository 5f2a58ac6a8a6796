"""What tags, suites and kernels were resolved to, as values.

``model.lock_file`` reads and writes them as ``Smolfile.lock``.
"""

from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.values import dataclass
from smolbuild.model.smolfile import Base, Dockerfile, Smolfile

__all__ = [
    "LOCK_VERSION",
    "Lock",
    "LockedDebian",
    "LockedDockerfile",
    "LockedImage",
    "LockedKernel",
    "LockedPackage",
    "LockedRun",
    "lock_path",
    "matches",
]

LOCK_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedRun:
    """How an image of a Docker engine wants to be run: known where there is no engine to ask."""

    env: tuple[tuple[str, str], ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDockerfile:
    """A Dockerfile, what it was built from, and the image that it gave."""

    dockerfile: str
    target: str | None
    args: tuple[tuple[str, str], ...]
    """Sorted by name."""
    context: str
    context_digest: Digest
    """Over the Dockerfile, every file of the context, arguments and target."""
    image: Digest
    """The image's ID: the digest of its configuration."""
    run: LockedRun = LockedRun()

    def fits(self, asked: Dockerfile) -> bool:
        """Return whether it is about what the Smolfile asks for; the files are not looked at."""
        return (self.dockerfile, self.target, self.args, self.context) == (
            asked.dockerfile,
            asked.target,
            asked.args,
            asked.context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedImage:
    """An image reference and what it stood for when it was locked."""

    reference: str
    """As in the Smolfile's ``image``."""
    digest: Digest
    """Of what the reference named: an index or a manifest."""
    platform_digest: Digest
    """Of the manifest for linux/amd64; equal to ``digest`` when that was a manifest."""
    platforms: tuple[tuple[str, Digest], ...] = ()
    """Of the index's manifests for every platform, sorted by its name (``linux/arm64/v8``)."""
    run: LockedRun | None = None
    """Of an image in a Docker engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPackage:
    """One Debian package; ``sha256`` is of the .deb file, 64 lower-case hex digits."""

    name: str
    version: str
    architecture: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDebian:
    """A Debian root: every package in it, and what was asked for."""

    suite: str
    variant: str
    architecture: str
    packages: tuple[LockedPackage, ...]
    requested: tuple[str, ...] = ()
    """The Smolfile's ``packages`` when it was locked: one taken out of it needs a new lock."""
    components: tuple[str, ...] = ("main",)
    snapshot: str | None = None
    """The date of the snapshot archive that it was made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedKernel:
    """The kernel package; ``sha256`` is of the .deb file, 64 lower-case hex digits."""

    package: str
    version: str
    sha256: str
    modules_sha256: str | None = None
    """Of the package that holds its modules, where they come apart (Ubuntu)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A whole lock. Of ``image``, ``debian`` and ``dockerfile`` at most one is set."""

    version: int = LOCK_VERSION
    image: LockedImage | None = None
    debian: LockedDebian | None = None
    dockerfile: LockedDockerfile | None = None
    kernel: LockedKernel | None = None


def lock_path(smolfile: Path) -> Path:
    """Return where the lock of ``smolfile`` lives: ``Smolfile.lock`` beside ``Smolfile``."""
    return smolfile.with_name(smolfile.name + ".lock")


def matches(lock: Lock, smolfile: Smolfile) -> tuple[str, ...]:
    """Return why ``lock`` does not fit ``smolfile``, one sentence each; empty when it fits."""
    return (*_base_reasons(lock, smolfile), *_kernel_reasons(lock, smolfile))


def _base_reasons(lock: Lock, smolfile: Smolfile) -> Iterator[str]:
    if isinstance(smolfile.base, Dockerfile):
        if lock.dockerfile is None or not lock.dockerfile.fits(smolfile.base):
            yield f"the lock does not have the image of {smolfile.base.dockerfile} as asked for"
    elif lock.dockerfile is not None:
        yield f"the lock holds {lock.dockerfile.dockerfile}, which the Smolfile does not ask for"
    if isinstance(smolfile.base, Base):
        if lock.debian is None:
            yield "the Smolfile asks for a Debian root, which the lock does not have"
        else:
            yield from _debian_reasons(lock.debian, smolfile.base)
    elif lock.debian is not None:
        yield "the lock holds a Debian root, which the Smolfile does not ask for"
    if lock.image is not None and lock.image.reference != smolfile.image:
        asked = smolfile.image or "no image"
        yield f"the lock is for image {lock.image.reference}, the Smolfile asks for {asked}"
    elif smolfile.image is not None and lock.image is None:
        yield f"the lock does not have image {smolfile.image}"


def _debian_reasons(locked: LockedDebian, base: Base) -> Iterator[str]:
    for name, old, new in (
        ("suite", locked.suite, base.debian),
        ("variant", locked.variant, base.variant),
        ("components", " ".join(locked.components), " ".join(base.components)),
        ("snapshot", locked.snapshot or "none", base.snapshot or "none"),
    ):
        if old != new:
            yield f"{name}: the lock has {old}, the Smolfile asks for {new}"
    asked, had = set(base.packages), set(locked.requested)
    for package in sorted(asked - had):
        yield f"the Smolfile asks for package {package}, which was not asked for when it was locked"
    for package in sorted(had - asked):
        yield f"the lock was made with package {package}, which the Smolfile no longer asks for"


def _kernel_reasons(lock: Lock, smolfile: Smolfile) -> Iterator[str]:
    if smolfile.kernel is None and lock.kernel is None:
        yield "the lock has no kernel"
    elif smolfile.kernel is not None and lock.kernel is not None:
        yield f"the lock has a kernel package, the Smolfile gives its own kernel {smolfile.kernel}"
