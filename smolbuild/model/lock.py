"""``Smolfile.lock``: tags, suites and kernels resolved to digests.

The lock is a TOML file beside the Smolfile, written by smolbuild and meant to be checked in. Its
bytes are deterministic: the same lock always gives the same file.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, cast

from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import UsageError
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
    "encode_lock",
    "lock_path",
    "matches",
    "parse_lock",
]

LOCK_VERSION = 1
_MAX_BYTES = 16 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HEADER = "# Written by smolbuild. Check it in; renew it with `smolbuild lock --update`.\n"


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


def parse_lock(data: bytes, *, file: str) -> Lock:
    """Parse the bytes of a lock. ``file`` names it in errors.

    Raises:
        UsageError: not UTF-8 TOML, another version, a member missing, unknown or malformed.

    """
    if len(data) > _MAX_BYTES:
        _bad(file, f"it has {len(data):,} bytes, more than the {_MAX_BYTES:,} allowed")
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _error(file, f"it is not TOML: {error}") from error
    root = _Members(content, file, "")
    version = content.get("version")
    if version != LOCK_VERSION or isinstance(version, bool):
        _bad(file, f"its version is not {LOCK_VERSION}")
    root.allow("version", "image", "debian", "dockerfile", "kernel")
    lock = Lock(
        image=_image(root.table("image")),
        debian=_debian(root.table("debian")),
        dockerfile=_dockerfile(root.table("dockerfile")),
        kernel=_kernel(root.table("kernel")),
    )
    if sum(base is not None for base in (lock.image, lock.debian, lock.dockerfile)) > 1:
        _bad(file, "it locks more than one base")
    return lock


def encode_lock(lock: Lock) -> bytes:
    """Return the bytes of ``lock``; ``parse_lock`` of them gives an equal value."""
    return (_HEADER + "".join(_lines(lock))).encode()


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


def _image(members: "_Members | None") -> LockedImage | None:
    if members is None:
        return None
    members.allow("reference", "digest", "platform_digest", "platforms", "run")
    platforms, run = members.table("platforms"), members.table("run")
    return LockedImage(
        reference=members.text("reference"),
        digest=members.digest("digest"),
        platform_digest=members.digest("platform_digest"),
        platforms=() if platforms is None else platforms.digests(),
        run=None if run is None else _run(run),
    )


def _dockerfile(members: "_Members | None") -> LockedDockerfile | None:
    if members is None:
        return None
    members.allow("dockerfile", "target", "args", "context", "context_digest", "image", "run")
    run = members.table("run")
    return LockedDockerfile(
        dockerfile=members.text("dockerfile"),
        target=members.text("target") if members.has("target") else None,
        args=tuple(sorted(members.pairs("args"))),
        context=members.text("context"),
        context_digest=members.digest("context_digest"),
        image=members.digest("image"),
        run=LockedRun() if run is None else _run(run),
    )


def _run(members: "_Members") -> LockedRun:
    members.allow("env", "entrypoint", "cmd", "workdir", "user")
    return LockedRun(
        env=members.pairs("env"),
        entrypoint=members.texts("entrypoint"),
        cmd=members.texts("cmd"),
        workdir=members.text("workdir") if members.has("workdir") else "",
        user=members.text("user") if members.has("user") else "",
    )


def _debian(members: "_Members | None") -> LockedDebian | None:
    if members is None:
        return None
    members.allow(
        "suite", "variant", "architecture", "components", "snapshot", "requested", "packages"
    )
    packages = []
    for package in members.tables("packages"):
        package.allow("name", "version", "architecture", "sha256")
        packages.append(
            LockedPackage(
                name=package.text("name"),
                version=package.text("version"),
                architecture=package.text("architecture"),
                sha256=package.sha256("sha256"),
            )
        )
    return LockedDebian(
        suite=members.text("suite"),
        variant=members.text("variant"),
        architecture=members.text("architecture"),
        packages=tuple(packages),
        requested=members.texts("requested"),
        components=members.texts("components"),
        snapshot=members.text("snapshot") if members.has("snapshot") else None,
    )


def _kernel(members: "_Members | None") -> LockedKernel | None:
    if members is None:
        return None
    members.allow("package", "version", "sha256", "modules_sha256")
    return LockedKernel(
        package=members.text("package"),
        version=members.text("version"),
        sha256=members.sha256("sha256"),
        modules_sha256=members.sha256("modules_sha256") if members.has("modules_sha256") else None,
    )


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of one table, read strictly."""

    values: Mapping[str, object]
    file: str
    where: str

    def allow(self, *names: str) -> None:
        for name in self.values:
            if name not in names:
                _bad(self.file, f"unknown key {self._at(name)[:90]!r}")

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            _bad(self.file, f"{self._at(name)} is missing or not a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            _bad(self.file, f"{self._at(name)} is missing or not a list of strings")
        return tuple(cast("list[str]", value))

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return a list of ``NAME=VALUE``, split."""
        found = []
        for text in self.texts(name):
            key, equals, value = text.partition("=")
            if not key or not equals:
                _bad(self.file, f"{self._at(name)} is not a list of NAME=VALUE")
            found.append((key, value))
        return tuple(found)

    def digest(self, name: str) -> Digest:
        try:
            return parse_digest(self.text(name))
        except ValueError as error:
            raise _error(self.file, f"{self._at(name)}: {error}") from error

    def digests(self) -> tuple[tuple[str, Digest], ...]:
        return tuple((name, self.digest(name)) for name in sorted(self.values))

    def sha256(self, name: str) -> str:
        text = self.text(name)
        if not _SHA256.fullmatch(text):
            _bad(self.file, f"{self._at(name)} is not 64 lower-case hex digits")
        return text

    def table(self, name: str) -> "_Members | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            _bad(self.file, f"{self._at(name)} is not a table")
        return _Members(value, self.file, self._at(name))

    def tables(self, name: str) -> "Iterator[_Members]":
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            _bad(self.file, f"{self._at(name)} is not a list of tables")
        for index, item in enumerate(value):
            yield _Members(item, self.file, f"{self._at(name)}[{index}]")

    def _at(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name


def _lines(lock: Lock) -> Iterator[str]:
    yield f"version = {lock.version}\n"
    if lock.image:
        yield "\n[image]\n"
        yield _line("reference", lock.image.reference)
        yield _line("digest", lock.image.digest)
        yield _line("platform_digest", lock.image.platform_digest)
        if lock.image.platforms:
            yield "\n[image.platforms]\n"
            for platform, digest in lock.image.platforms:
                yield _line(_quoted(platform), digest)
        if lock.image.run:
            yield from _run_lines("image", lock.image.run)
    if lock.debian:
        yield "\n[debian]\n"
        yield _line("suite", lock.debian.suite)
        yield _line("variant", lock.debian.variant)
        yield _line("architecture", lock.debian.architecture)
        yield f"components = {_array(lock.debian.components)}\n"
        if lock.debian.snapshot:
            yield _line("snapshot", lock.debian.snapshot)
        yield f"requested = {_array(lock.debian.requested)}\n"
        for package in lock.debian.packages:
            yield "\n[[debian.packages]]\n"
            yield _line("name", package.name)
            yield _line("version", package.version)
            yield _line("architecture", package.architecture)
            yield _line("sha256", package.sha256)
    if lock.dockerfile:
        yield "\n[dockerfile]\n"
        yield _line("dockerfile", lock.dockerfile.dockerfile)
        if lock.dockerfile.target is not None:
            yield _line("target", lock.dockerfile.target)
        yield f"args = {_array(f'{name}={value}' for name, value in lock.dockerfile.args)}\n"
        yield _line("context", lock.dockerfile.context)
        yield _line("context_digest", lock.dockerfile.context_digest)
        yield _line("image", lock.dockerfile.image)
        yield from _run_lines("dockerfile", lock.dockerfile.run)
    if lock.kernel:
        yield "\n[kernel]\n"
        yield _line("package", lock.kernel.package)
        yield _line("version", lock.kernel.version)
        yield _line("sha256", lock.kernel.sha256)
        if lock.kernel.modules_sha256:
            yield _line("modules_sha256", lock.kernel.modules_sha256)


def _run_lines(owner: str, run: LockedRun) -> Iterator[str]:
    yield f"\n[{owner}.run]\n"
    yield f"env = {_array(f'{name}={value}' for name, value in run.env)}\n"
    yield f"entrypoint = {_array(run.entrypoint)}\n"
    yield f"cmd = {_array(run.cmd)}\n"
    if run.workdir:
        yield _line("workdir", run.workdir)
    if run.user:
        yield _line("user", run.user)


def _line(name: str, text: str) -> str:
    return f"{name} = {_quoted(text)}\n"


def _array(texts: Iterable[str]) -> str:
    return "[" + ", ".join(_quoted(text) for text in texts) + "]"


def _quoted(text: str) -> str:
    """Return a TOML basic string; everything that may not stand in one is escaped."""
    return '"' + "".join(_ESCAPES.get(char, char) for char in text) + '"'


_ESCAPES = {chr(code): f"\\u{code:04x}" for code in (*range(32), 127)} | {'"': '\\"', "\\": "\\\\"}


def _error(file: str, problem: str) -> UsageError:
    return UsageError(
        f"{file}: {problem}",
        hint="the lock is written by smolbuild: make it anew with `smolbuild lock --update`",
        code="lock",
    )


def _bad(file: str, problem: str) -> NoReturn:
    raise _error(file, problem)
