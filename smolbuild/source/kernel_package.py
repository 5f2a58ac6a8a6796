"""Debian's cloud kernel through the host's own apt: found, fetched, unpacked, never installed.

apt verifies what it downloads against its signed lists; here the package must in addition have the
SHA-256 that the lock names.
"""

import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from smolbuild.core.canon import canonical_json
from smolbuild.core.digest import digest_file, hex_of
from smolbuild.core.errors import HostError
from smolbuild.core.events import Emit, Message
from smolbuild.core.files import (
    file_lock,
    fsync_directory,
    private_directory,
    require_space,
    sweep_temporaries,
    write_atomic,
)
from smolbuild.core.process import run
from smolbuild.guest.kernel import (
    GUEST_MODULES,
    OPTIONAL_MODULES,
    RECORD,
    builtin_modules,
    kernel_digest,
    module_name,
    order_modules,
    plain_module,
    require_x86_64,
)
from smolbuild.model.lock import LockedKernel

__all__ = ["META_PACKAGES", "fetch_kernel", "resolve_kernel"]

META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-generic")
"""Debian's kernel for virtual machines first, then Ubuntu's."""

_APT_TIMEOUT = 60.0
_DOWNLOAD_TIMEOUT = 600.0
_UNPACK_TIMEOUT = 120.0
_IMAGE_LIMIT = 256 << 20
_SPACE = 256 << 20
"""Bytes for the package and what of it is unpacked."""
_RELEASE = re.compile(r"linux-image-(?:unsigned-)?([0-9][A-Za-z0-9.+~-]*)")
_UPDATE = "run `apt-get update` as root, or name a kernel file with `smolbuild.kernel`"


def resolve_kernel() -> LockedKernel:
    """Return the kernel package that the host's apt would install now. Reads apt's lists only.

    Raises:
        HostError: the architecture is not supported, apt is missing, or its lists have no kernel.

    """
    require_x86_64()
    for meta in META_PACKAGES:
        control = _apt_show(meta)
        found = _RELEASE.search(control.get("Depends", ""))
        if found is None:
            continue
        image = _apt_show(found[0])
        if "SHA256" in image:
            apart = _modules_package(found[0])  # Ubuntu ships modules apart
            modules = _apt_show(apart) if apart in image.get("Depends", "") else {}
            return LockedKernel(
                package=found[0],
                version=image["Version"],
                sha256=image["SHA256"].lower(),
                modules_sha256=modules["SHA256"].lower() if "SHA256" in modules else None,
            )
    raise HostError(
        f"apt knows no kernel for virtual machines (looked for {', '.join(META_PACKAGES)})",
        hint=_UPDATE,
        code="no-kernel",
    )


def fetch_kernel(directory: Path, chosen: LockedKernel, emit: Emit) -> None:
    """Bring the kernel ``chosen`` into the cache entry ``directory``, if it is not there yet.

    Atomic and idempotent; two at once wait for each other.

    Raises:
        HostError: apt cannot provide the package, or it does not have the locked digest.

    """
    with file_lock(directory.parent / ".lock", timeout=_DOWNLOAD_TIMEOUT, what="the kernel cache"):
        if not directory.is_dir():
            emit(Message(level="info", text=f"kernel {chosen.package} {chosen.version}"))
            require_space(directory.parent, _SPACE, what="fetching and unpacking the kernel")
            sweep_temporaries(directory.parent, older_than=0)
            _fill(directory, chosen)


def _apt_show(package: str) -> dict[str, str]:
    """Return the control fields of apt's candidate of ``package``; empty when there is none."""
    shown = run(
        ["apt-cache", "show", "--no-all-versions", package], timeout=_APT_TIMEOUT, env=_apt_env()
    )
    fields: dict[str, str] = {}
    for line in shown.stdout.decode(errors="replace").splitlines():
        if not line.strip():
            break
        key, colon, value = line.partition(":")
        if colon and not line[0].isspace():
            fields[key] = value.strip()
    return fields


def _apt_env() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


def _fill(directory: Path, chosen: LockedKernel) -> None:
    with tempfile.TemporaryDirectory(prefix=".tmp-kernel-", dir=directory.parent) as scratch:
        work = Path(scratch)
        work.chmod(0o755)  # apt's own user must be able to look, or it warns
        package = _download(work / "image", chosen.package, chosen.version, chosen.sha256)
        unpacked = work / "unpacked"
        unpacked.mkdir(mode=0o755)
        _unpack(package, unpacked)
        if chosen.modules_sha256 is not None:
            name = _modules_package(chosen.package)
            modules = _download(work / "modules", name, chosen.version, chosen.modules_sha256)
            _unpack(modules, unpacked)
        if not (unpacked / "vmlinuz").exists():
            raise HostError(f"{chosen.package} holds no kernel image", code="no-kernel")
        ready = work / "ready"
        _select(unpacked, ready)
        ready.rename(directory)
        fsync_directory(directory.parent)


def _select(unpacked: Path, ready: Path) -> None:
    """Make the cache entry: the image, the modules a guest needs, and a record of their order."""
    available = {path.stem: path for path in sorted((unpacked / "modules").glob("*.ko"))}
    modules = order_modules(
        GUEST_MODULES, available, builtin_modules(unpacked), optional=OPTIONAL_MODULES
    )
    record = {
        "digest": kernel_digest(unpacked / "vmlinuz", modules),
        "modules": [path.name for path in modules],
    }
    private_directory(ready)
    for path in (unpacked / "vmlinuz", *modules):
        write_atomic(ready / path.name, path.read_bytes())
    write_atomic(ready / RECORD, canonical_json(record))


def _modules_package(image: str) -> str:
    """Return the name that Ubuntu gives the package with the modules of the kernel ``image``."""
    found = _RELEASE.fullmatch(image)
    return f"linux-modules-{found[1] if found else image}"


def _download(directory: Path, package: str, version: str, sha256: str) -> Path:
    directory.mkdir(mode=0o755)
    done = run(
        ["apt-get", "download", "-q", f"{package}={version}"],
        timeout=_DOWNLOAD_TIMEOUT,
        cwd=directory,
        env=_apt_env(),
    )
    found = sorted(directory.glob("*.deb"))
    if done.status != 0 or len(found) != 1:
        raise HostError(
            f"apt cannot download {package} {version}",
            details=done.stderr.decode(errors="replace")[-2000:],
            hint=f"{_UPDATE}; when the locked version is gone: `smolbuild lock --update`",
            code="no-kernel",
        )
    if hex_of(digest_file(found[0])) != sha256:
        raise HostError(
            f"{package} {version} from apt has another SHA-256 than the lock",
            hint="run `smolbuild lock --update` to accept what apt offers now",
            code="kernel-digest",
        )
    return found[0]


def _unpack(package: Path, target: Path) -> None:
    """Copy the image, ``modules.builtin`` and the modules of ``package`` into ``target``, flat."""
    for member, stream in _members(package):
        name = module_name(member.name)
        if re.fullmatch(r"(\./)?boot/vmlinuz-[^/]+", member.name):
            data = stream.read(_IMAGE_LIMIT)
            (target / "vmlinuz").write_bytes(data)
        elif member.name.endswith("/modules.builtin"):
            (target / "modules.builtin").write_bytes(stream.read(_IMAGE_LIMIT))
        elif name is not None and "/kernel/" in member.name:
            (target / "modules").mkdir(exist_ok=True)
            plain = plain_module(member.name, stream.read(_IMAGE_LIMIT))
            (target / "modules" / f"{name}.ko").write_bytes(plain)


def _members(package: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    with _data_of(package) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                yield member, content


@contextmanager
def _data_of(package: Path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=package.parent) as spool:
        done = run(
            ["dpkg-deb", "--fsys-tarfile", str(package)], timeout=_UNPACK_TIMEOUT, stdout=spool
        )
        if done.status != 0:
            raise HostError(
                f"{package.name} does not unpack",
                details=done.stderr.decode(errors="replace")[-2000:],
            )
        spool.seek(0)
        yield spool
