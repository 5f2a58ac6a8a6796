"""Kernels: Debian's cloud kernel through the host's own apt, unpacked, never installed; or a file.

apt verifies what it downloads against its signed lists; here the package must in addition have the
SHA-256 that the lock names. Unpacked kernels are cached by that digest, so apt is asked once.
"""

import json
import os
import platform
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from smolbuild.core.canon import canonical_json
from smolbuild.core.digest import digest_file, hex_of, parse_digest
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
    Kernel,
    kernel_digest,
    module_name,
    order_modules,
    plain_module,
)
from smolbuild.model.lock import LockedKernel

__all__ = ["Kernel", "kernel_from_path", "prepare_kernel", "resolve_kernel"]

META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-generic")
"""Debian's kernel for virtual machines first, then Ubuntu's."""

_RECORD = "kernel.json"
"""In a cache entry: digest and module order, so that nothing is hashed when it is used again."""

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
    _require_x86_64()
    for meta in META_PACKAGES:
        control = _apt_show(meta)
        found = _RELEASE.search(control.get("Depends", ""))
        if found is None:
            continue
        image = _apt_show(found[0])
        if "SHA256" in image:
            return LockedKernel(
                package=found[0], version=image["Version"], sha256=image["SHA256"].lower()
            )
    raise HostError(
        f"apt knows no kernel for virtual machines (looked for {', '.join(META_PACKAGES)})",
        hint=_UPDATE,
        code="no-kernel",
    )


def prepare_kernel(cache: Path, *, locked: LockedKernel | None, emit: Emit) -> Kernel:
    """Return the kernel that ``locked`` names (or apt's own choice), from the cache if it is there.

    Works without root. Atomic and idempotent; two at once wait for each other. With a cached kernel
    neither apt nor the network is used.

    Raises:
        HostError: the architecture is not supported, apt cannot provide the package, or what it
            provides does not have the locked digest.

    """
    _require_x86_64()
    chosen = locked if locked is not None else resolve_kernel()
    if not re.fullmatch("[0-9a-f]{64}", chosen.sha256):
        raise HostError(f"the locked digest of {chosen.package} is not a SHA-256")
    directory = private_directory(cache / "kernel") / chosen.sha256
    if not directory.is_dir():
        with file_lock(
            directory.parent / ".lock", timeout=_DOWNLOAD_TIMEOUT, what="the kernel cache"
        ):
            if not directory.is_dir():
                emit(Message(level="info", text=f"kernel {chosen.package} {chosen.version}"))
                require_space(directory.parent, _SPACE, what="fetching and unpacking the kernel")
                sweep_temporaries(directory.parent, older_than=0)
                _fill(directory, chosen)
    return _load(directory, chosen)


def kernel_from_path(path: Path) -> Kernel:
    """Return the kernel image (a bzImage) that the user gave.

    Modules come from a sibling directory ``modules/`` when there is one (``*.ko``, with
    ``modules.builtin`` where present); without it everything must be built in.

    Raises:
        HostError: there is no such file, it is no bzImage, or modules are missing.

    """
    _require_x86_64()
    try:
        with path.open("rb") as stream:
            head = stream.read(0x210)
    except OSError as error:
        raise HostError(f"cannot read the kernel {path}: {error.strerror}") from error
    if head[0x202:0x206] != b"HdrS":  # Linux, Documentation/arch/x86/boot.rst
        raise HostError(f"{path} is not a bzImage", hint="give the compressed x86_64 kernel image")
    modules: tuple[Path, ...] = ()
    directory = path.parent / "modules"
    if directory.is_dir():
        files = {module_name(p.name): p for p in sorted(directory.rglob("*.ko"))}
        available = {name: p for name, p in files.items() if name is not None}
        modules = order_modules(GUEST_MODULES, available, _builtin(directory))
    return Kernel(
        package="",
        version="",
        vmlinuz=path,
        modules=modules,
        digest=kernel_digest(path, modules),
    )


def _require_x86_64() -> None:
    machine = platform.machine()
    if machine not in {"x86_64", "amd64", "AMD64"}:
        raise HostError(
            f"kernels for {machine} are not supported yet, only for x86_64", code="architecture"
        )


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
    with tempfile.TemporaryDirectory(prefix=".tmp-kernel-", dir=directory.parent) as name:
        work = Path(name)
        work.chmod(0o755)  # apt's own user must be able to look, or it warns
        package = _download(work / "image", chosen.package, chosen.version)
        if hex_of(digest_file(package)) != chosen.sha256:
            raise HostError(
                f"{chosen.package} {chosen.version} from apt has another SHA-256 than the lock",
                hint="run `smolbuild lock --update` to accept what apt offers now",
                code="kernel-digest",
            )
        unpacked = work / "unpacked"
        unpacked.mkdir(mode=0o755)
        _unpack(package, unpacked)
        if not (unpacked / "modules.builtin").exists():  # Ubuntu ships modules apart
            release = chosen.package.split("-", 2)[2]
            modules = _download(work / "modules", f"linux-modules-{release}", chosen.version)
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
    modules = order_modules(GUEST_MODULES, available, _builtin(unpacked))
    record = {
        "digest": kernel_digest(unpacked / "vmlinuz", modules),
        "modules": [path.name for path in modules],
    }
    private_directory(ready)
    for path in (unpacked / "vmlinuz", *modules):
        write_atomic(ready / path.name, path.read_bytes())
    write_atomic(ready / _RECORD, canonical_json(record))


def _download(directory: Path, package: str, version: str) -> Path:
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


def _load(directory: Path, chosen: LockedKernel) -> Kernel:
    try:
        record = json.loads((directory / _RECORD).read_bytes())
        modules = tuple(directory / Path(name).name for name in record["modules"])
        digest = parse_digest(record["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostError(
            f"the cached kernel {directory} is damaged: {error}", hint=f"remove {directory}"
        ) from error
    return Kernel(
        package=chosen.package,
        version=chosen.version,
        vmlinuz=directory / "vmlinuz",
        modules=modules,
        digest=digest,
    )


def _builtin(directory: Path) -> frozenset[str]:
    path = directory / "modules.builtin"
    if not path.is_file():
        return frozenset()
    names = (module_name(line.strip()) for line in path.read_text(errors="replace").splitlines())
    return frozenset(name for name in names if name is not None)
