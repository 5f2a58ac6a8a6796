"""Kernels: Debian's cloud kernel from the cache or through the host's apt; or a file.

Unpacked kernels are cached by what was downloaded and what is taken of it, so apt
(``source.kernel_package``) is asked once.
"""

import json
import re
from pathlib import Path

from smolbuild.core.digest import Digest, hex_of, parse_digest
from smolbuild.core.errors import HostError, UsageError
from smolbuild.core.events import Emit
from smolbuild.core.files import private_directory
from smolbuild.guest.kernel import (
    GUEST_MODULES,
    OPTIONAL_MODULES,
    RECORD,
    Kernel,
    builtin_modules,
    kernel_digest,
    module_name,
    order_modules,
    package_digest,
    require_x86_64,
)
from smolbuild.model.lock import LockedKernel

__all__ = ["Kernel", "kernel_from_path", "kernel_identity", "prepare_kernel"]


def kernel_identity(path: Path | None, locked: LockedKernel | None) -> Digest:
    """Return what the kernel is in a provenance key: of a package the lock says it, cheaply.

    Args:
        path: the kernel that the user gave, or None.
        locked: the kernel's part of the lock.

    Raises:
        HostError: the architecture is not supported, or ``path`` is no kernel.
        UsageError: the lock has no kernel.

    """
    if path is not None:
        return kernel_from_path(path).digest
    require_x86_64()
    if locked is None:
        raise UsageError("the lock has no kernel", hint="run `smolbuild lock`", code="lock")
    return package_digest(locked.sha256, locked.modules_sha256)


def prepare_kernel(cache: Path, *, locked: LockedKernel | None, emit: Emit) -> Kernel:
    """Return the kernel that ``locked`` names (or apt's own choice), from the cache if it is there.

    Works without root. Atomic and idempotent; two at once wait for each other. With a cached kernel
    neither apt nor the network is used.

    Raises:
        HostError: the architecture is not supported, apt cannot provide the package, or what it
            provides does not have the locked digest.

    """
    require_x86_64()
    chosen = locked
    if chosen is None:
        from smolbuild.source.kernel_package import resolve_kernel

        chosen = resolve_kernel()
    if not re.fullmatch("[0-9a-f]{64}", chosen.sha256):
        raise HostError(f"the locked digest of {chosen.package} is not a SHA-256")
    identity = package_digest(chosen.sha256, chosen.modules_sha256)
    directory = private_directory(cache / "kernel") / hex_of(identity)
    if not directory.is_dir():
        from smolbuild.source.kernel_package import fetch_kernel

        fetch_kernel(directory, chosen, emit)
    return _load(directory, chosen, identity)


def kernel_from_path(path: Path) -> Kernel:
    """Return the kernel image (a bzImage) that the user gave.

    Modules come from a sibling directory ``modules/`` when there is one (``*.ko``, with
    ``modules.builtin`` where present); without it everything must be built in.

    Raises:
        HostError: there is no such file, it is no bzImage, or modules are missing.

    """
    require_x86_64()
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
        modules = order_modules(
            GUEST_MODULES, available, builtin_modules(directory), optional=OPTIONAL_MODULES
        )
    digest = kernel_digest(path, modules)
    return Kernel(
        package="", version="", vmlinuz=path, modules=modules, digest=digest, content=digest
    )


def _load(directory: Path, chosen: LockedKernel, identity: Digest) -> Kernel:
    try:
        record = json.loads((directory / RECORD).read_bytes())
        modules = tuple(directory / Path(name).name for name in record["modules"])
        content = parse_digest(record["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostError(
            f"the cached kernel {directory} is damaged: {error}", hint=f"remove {directory}"
        ) from error
    return Kernel(
        package=chosen.package,
        version=chosen.version,
        vmlinuz=directory / "vmlinuz",
        modules=modules,
        digest=identity,
        content=content,
    )
