"""``Smolfile.lock``: the lock as a file.

It is a TOML file beside the Smolfile, written by smolbuild and meant to be checked in. Its bytes
are deterministic: the same lock always gives the same file.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn, cast

from smolbuild.core.digest import Digest, parse_digest
from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.lock import (
    LOCK_VERSION,
    Lock,
    LockedDebian,
    LockedDockerfile,
    LockedImage,
    LockedKernel,
    LockedPackage,
    LockedRun,
)
from smolbuild.model.toml_text import toml_string

__all__ = ["encode_lock", "parse_lock"]

_MAX_BYTES = 16 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HEADER = "# Written by smolbuild. Check it in; renew it with `smolbuild lock --update`.\n"


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
        yield from _image_lines(lock.image)
    if lock.debian:
        yield from _debian_lines(lock.debian)
    if lock.dockerfile:
        yield from _dockerfile_lines(lock.dockerfile)
    if lock.kernel:
        yield from _kernel_lines(lock.kernel)


def _image_lines(image: LockedImage) -> Iterator[str]:
    yield "\n[image]\n"
    yield _line("reference", image.reference)
    yield _line("digest", image.digest)
    yield _line("platform_digest", image.platform_digest)
    if image.platforms:
        yield "\n[image.platforms]\n"
        for platform, digest in image.platforms:
            yield _line(toml_string(platform), digest)
    if image.run:
        yield from _run_lines("image", image.run)


def _debian_lines(debian: LockedDebian) -> Iterator[str]:
    yield "\n[debian]\n"
    yield _line("suite", debian.suite)
    yield _line("variant", debian.variant)
    yield _line("architecture", debian.architecture)
    yield f"components = {_array(debian.components)}\n"
    if debian.snapshot:
        yield _line("snapshot", debian.snapshot)
    yield f"requested = {_array(debian.requested)}\n"
    for package in debian.packages:
        yield "\n[[debian.packages]]\n"
        yield _line("name", package.name)
        yield _line("version", package.version)
        yield _line("architecture", package.architecture)
        yield _line("sha256", package.sha256)


def _dockerfile_lines(dockerfile: LockedDockerfile) -> Iterator[str]:
    yield "\n[dockerfile]\n"
    yield _line("dockerfile", dockerfile.dockerfile)
    if dockerfile.target is not None:
        yield _line("target", dockerfile.target)
    yield f"args = {_array(f'{name}={value}' for name, value in dockerfile.args)}\n"
    yield _line("context", dockerfile.context)
    yield _line("context_digest", dockerfile.context_digest)
    yield _line("image", dockerfile.image)
    yield from _run_lines("dockerfile", dockerfile.run)


def _kernel_lines(kernel: LockedKernel) -> Iterator[str]:
    yield "\n[kernel]\n"
    yield _line("package", kernel.package)
    yield _line("version", kernel.version)
    yield _line("sha256", kernel.sha256)
    if kernel.modules_sha256:
        yield _line("modules_sha256", kernel.modules_sha256)


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
    return f"{name} = {toml_string(text)}\n"


def _array(texts: Iterable[str]) -> str:
    return "[" + ", ".join(toml_string(text) for text in texts) + "]"


def _error(file: str, problem: str) -> UsageError:
    return UsageError(
        f"{file}: {problem}",
        hint="the lock is written by smolbuild: make it anew with `smolbuild lock --update`",
        code="lock",
    )


def _bad(file: str, problem: str) -> NoReturn:
    raise _error(file, problem)
