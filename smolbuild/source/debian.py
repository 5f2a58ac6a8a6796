"""A Debian root made on the spot: locked by apt, installed by mmdebstrap, normalised in memory.

``resolve_debian`` asks a private apt what the packages bring and with which hashes; nothing is
built. ``build_debian`` downloads exactly that (kept by SHA-256, so a package that has left the
archive can still come from the cache) and lets mmdebstrap install it from an archive that holds
nothing else. mmdebstrap runs as root where we are root, else in a user namespace, else under
fakechroot.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from smolbuild.core.clock import Deadline
from smolbuild.core.digest import digest_file, hex_of
from smolbuild.core.errors import BuildError, HostError, UsageError
from smolbuild.core.events import Emit, Message, Output
from smolbuild.core.files import file_lock, private_directory, require_space
from smolbuild.core.process import kill_group, run, spawn
from smolbuild.core.programs import find_program
from smolbuild.core.text import counted
from smolbuild.model.lock import LockedDebian, LockedPackage
from smolbuild.model.smolfile import Base
from smolbuild.source.apt_root import ARCHITECTURE, PrivateApt
from smolbuild.source.apt_sources import (
    AptSource,
    default_sources,
    plain_environment,
    sources_for,
)
from smolbuild.source.content import FileBacking, Region
from smolbuild.source.deb import read_deb
from smolbuild.source.deb_archive import CachedDeb, serve_archive
from smolbuild.source.debian_clean import clean_root
from smolbuild.source.layers import apply_layer
from smolbuild.source.tree import Tree

__all__ = ["build_debian", "resolve_debian"]

_ESSENTIAL = "?essential"
_PRIORITIES = {
    "custom": None,
    "extract": None,
    "essential": _ESSENTIAL,
    "apt": _ESSENTIAL,
    "required": "?or(?essential,?priority(required))",
    "minbase": "?or(?essential,?priority(required))",
    "buildd": "?or(?essential,?priority(required))",
    "important": "?or(?essential,?priority(required),?priority(important))",
    "debootstrap": "?or(?essential,?priority(required),?priority(important))",
    "-": "?or(?essential,?priority(required),?priority(important))",
    "standard": "?or(?essential,?priority(required),?priority(important),?priority(standard))",
}
"""mmdebstrap's variants as apt patterns."""
_EXTRA = {"apt": ("apt",), "buildd": ("build-essential",)}

_LOCK_TIMEOUT = 1800.0
_BUILD_TIMEOUT = 3600.0
_PROBE_TIMEOUT = 30.0
_TAIL = 8000
_NOISE = (
    b"I: using ",
    b"I: removing tempdir",
    b"I: running --setup-hook",
    b"W: Download is performed unsandboxed",  # as root; each package has its digest in the lock
)
"""What mmdebstrap says that no user can do anything about; an error's details still have it."""
_SPACE = 1 << 30

# Creating PostgreSQL's first cluster stores a random identifier and the time; a step of the
# Smolfile makes the cluster it wants. The file is taken out again afterwards.
_SETUP_HOOK = (
    'mkdir -p "$1/etc/postgresql-common/createcluster.d" && '
    "echo 'create_main_cluster = false' "
    '> "$1/etc/postgresql-common/createcluster.d/smolbuild.conf"'
)


def resolve_debian(base: Base, *, cache: Path, emit: Emit) -> LockedDebian:
    """Return the exact package set that ``base`` stands for now. Needs the network, builds nothing.

    Raises:
        UsageError: the variant is unknown.
        HostError: apt is missing, no mirror is known, or the lists cannot be fetched.
        BuildError: a package does not exist or cannot be installed.

    """
    wanted = _wanted(base)
    emit(Message(level="info", text=f"resolving Debian {base.debian}"))
    sources = sources_for(base)
    with _locked(cache):
        apt = PrivateApt(sources, cache)
        apt.update()
        packages = apt.closure(wanted)
    return LockedDebian(
        suite=base.debian,
        variant=base.variant,
        architecture=ARCHITECTURE,
        packages=packages,
        requested=base.packages,
        components=base.components,
        snapshot=base.snapshot,
    )


def build_debian(
    base: Base,
    lock: LockedDebian,
    *,
    cache: Path,
    work: Path,
    resources: contextlib.ExitStack,
    emit: Emit,
) -> Tree:
    """Return the root of ``lock``, installed and normalised: the same lock gives the same tree.

    Args:
        base: names the mirror, if any.
        lock: what to install, exactly.
        cache: keeps downloaded packages and apt's lists.
        work: takes the root's tar (an unnamed file) and, as root, the root while it is made.
        resources: closes the file that the tree's content refers to.
        emit: receives mmdebstrap's output.

    Raises:
        BuildError: packages have left the archive, the installation failed, or installed something
            else than the lock says.
        HostError: no way to run mmdebstrap, no network, no space.

    """
    mode = _mode()
    require_space(work, _SPACE, what="a Debian root")
    with _locked(cache):
        packages = _fetch(base, lock, cache, emit)
    epoch = max(package.deb.epoch for package in packages)
    tar = resources.enter_context(
        cast("IO[bytes]", tempfile.TemporaryFile(dir=work, prefix=".tmp-debian-"))  # noqa: SIM115
    )
    with serve_archive(lock, packages) as uri:
        _mmdebstrap(lock, mode, uri, epoch, work, tar, emit)
    backing = resources.enter_context(
        FileBacking(Path(f"root of Debian {lock.suite}"), os.dup(tar.fileno()))
    )
    tree = Tree()
    apply_layer(tree, Region(backing, 0, backing.size), what=f"the root of Debian {lock.suite}")
    lines = [source.public() for source in _image_sources(base)]
    clean_root(tree, lock, packages, sources=lines, epoch=epoch)
    _check_installed(tree, lock)
    return tree


def _wanted(base: Base) -> list[str]:
    if base.variant not in _PRIORITIES:
        raise UsageError(
            f"unknown Debian variant {base.variant!r}",
            hint=f"one of {', '.join(name for name in _PRIORITIES if name != '-')}",
        )
    pattern = _PRIORITIES[base.variant]
    suite = re.escape(base.debian)
    archive = f"?or(?archive(^{suite}$),?codename(^{suite}$))"
    narrowed = f"?narrow({archive},?architecture({ARCHITECTURE}),{pattern})"
    return [*([narrowed] if pattern else []), *_EXTRA.get(base.variant, ()), *base.packages]


def _locked(cache: Path) -> contextlib.AbstractContextManager[None]:
    path = private_directory(cache) / "debian.lock"
    return file_lock(path, timeout=_LOCK_TIMEOUT, what="the cache of Debian packages")


def _fetch(base: Base, lock: LockedDebian, cache: Path, emit: Emit) -> list[CachedDeb]:
    """Return the locked packages from the cache, after downloading those that are missing."""
    store = private_directory(cache / "debs")
    missing = [
        package for package in lock.packages if not (store / f"{package.sha256}.deb").is_file()
    ]
    if missing:
        emit(Message(level="info", text=f"downloading {counted(len(missing), 'Debian package')}"))
        _download(base, lock, missing, store, cache)
    result = []
    for package in lock.packages:
        path = store / f"{package.sha256}.deb"
        result.append(CachedDeb(path=path, sha256=package.sha256, deb=read_deb(path)))
    return result


def _download(
    base: Base,
    lock: LockedDebian,
    missing: Sequence[LockedPackage],
    store: Path,
    cache: Path,
) -> None:
    apt = PrivateApt(sources_for(base), cache)
    apt.update()
    there = apt.available(missing)
    gone = [package for package in missing if package.sha256 not in there]
    if gone:
        raise BuildError(
            f"{len(gone)} locked packages are no longer in the archive of Debian {lock.suite}",
            hint="accept the newer ones with `smolbuild lock --update`",
            code="archive-moved-on",
            details="\n".join(f"{package.name} {package.version}" for package in gone[:50]),
        )
    with tempfile.TemporaryDirectory(dir=store, prefix=".tmp-") as name:
        directory = Path(name)
        apt.download(missing, directory)
        for path in sorted(directory.glob("*.deb")):
            path.replace(store / f"{hex_of(digest_file(path))}.deb")
    absent = [p.name for p in missing if not (store / f"{p.sha256}.deb").is_file()]
    if absent:
        raise BuildError(
            f"apt downloaded other files than the lock names for {', '.join(absent[:20])}",
            hint="run `smolbuild lock --update`",
            code="package-digest",
        )


def _mode() -> str:
    """Return how mmdebstrap can run here.

    Raises:
        HostError: in no way; says what to install.

    """
    find_program("mmdebstrap")
    if os.geteuid() == 0:
        return "root"
    probe = run(["mmdebstrap", "--unshare-helper", "true"], timeout=_PROBE_TIMEOUT)
    if probe.status == 0:
        return "unshare"
    if shutil.which("fakechroot") and shutil.which("fakeroot"):
        return "fakechroot"
    raise HostError(
        "a Debian root cannot be made without root here: user namespaces are not available "
        "and fakechroot is not installed",
        hint="apt-get install uidmap (with lines for your user in /etc/subuid and /etc/subgid), "
        "or apt-get install fakechroot fakeroot",
        code="no-namespaces",
        details=probe.stderr.decode(errors="replace")[-1000:],
    )


def _wrapper(mode: str) -> tuple[str, ...]:
    """Return what runs mmdebstrap so that it can leave nothing behind.

    As root its mounts would be the host's and its children would outlive it: in namespaces of its
    own both end with it, also after kill -9. Without root it makes its own.
    """
    if mode == "fakechroot":
        return ("fakechroot", "fakeroot")
    if mode == "root":
        own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        if run([*own, "true"], timeout=_PROBE_TIMEOUT).status == 0:
            return own
    return ()


def _mmdebstrap(
    lock: LockedDebian, mode: str, uri: str, epoch: int, work: Path, tar: IO[bytes], emit: Emit
) -> None:
    names = [package.name for package in lock.packages]
    argv = [
        *_wrapper(mode),
        "mmdebstrap",
        f"--mode={mode}",
        "--format=tar",
        f"--variant={_installing_variant(lock)}",
        f"--architectures={lock.architecture}",
        '--aptopt=Acquire::http::Proxy "DIRECT"',
        '--aptopt=Acquire::http::Pipeline-Depth "0"',
        '--aptopt=Acquire::Languages "none"',
        "--dpkgopt=force-unsafe-io",
        f"--include={','.join(names)}",
        f"--setup-hook={_SETUP_HOOK}",
        lock.suite,
        "-",
        f"deb [trusted=yes] {uri} {lock.suite} main",
    ]
    environment = {
        **plain_environment(),
        "SOURCE_DATE_EPOCH": str(epoch),
        "PYTHONHASHSEED": "0",
        "PERL_HASH_SEED": "0",
        "TZ": "UTC",
    }
    if mode == "root":
        environment["TMPDIR"] = str(work)
    child = spawn(argv, env=environment, stdout=tar, stderr=subprocess.PIPE)
    tail = bytearray()
    reader = threading.Thread(target=_forward, args=(child.stderr, tail, emit), daemon=True)
    reader.start()
    deadline = Deadline.after(_BUILD_TIMEOUT)
    try:
        status = child.wait(timeout=deadline.left())
    except subprocess.TimeoutExpired as error:
        raise HostError(
            f"mmdebstrap did not end within {_BUILD_TIMEOUT:.0f} s", code="program-timeout"
        ) from error
    finally:
        kill_group(child)
        reader.join(timeout=_PROBE_TIMEOUT)
        if child.stderr is not None and not reader.is_alive():
            child.stderr.close()
    if status != 0:
        raise BuildError(
            f"the Debian root of {lock.suite} could not be installed (mmdebstrap: {status})",
            hint="the output below says which package failed",
            code="mmdebstrap",
            details="\n".join(tail.decode(errors="replace").splitlines()[-50:]),
        )


def _forward(stream: IO[bytes] | None, tail: bytearray, emit: Emit) -> None:
    """Pass on what mmdebstrap says, keeping its end for an error."""
    if stream is None:
        return
    for line in iter(stream.readline, b""):
        tail += line
        del tail[:-_TAIL]
        if not line.startswith(_NOISE):
            emit(Output(source="mmdebstrap", stream="stderr", data=line))


def _installing_variant(lock: LockedDebian) -> str:
    # The lock names every package; the variant only says what mmdebstrap unpacks first.
    return "custom" if lock.variant in ("custom", "extract") else "essential"


def _image_sources(base: Base) -> Sequence[AptSource]:
    """Return what the image's own apt uses: the named mirror, else the default of all Debian roots.

    Not this host's mirrors: the same lock must give the same root everywhere.
    """
    return sources_for(base) if base.mirror is not None else default_sources(base)


def _check_installed(tree: Tree, lock: LockedDebian) -> None:
    node = tree.find(b"var/lib/dpkg/status")
    text = b"" if node is None else node.content.read(0, node.content.size)
    installed = set()
    for stanza in text.decode(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"(?m)^(Package|Version|Architecture|Status): (.*)$", stanza))
        if fields.get("Status", "").endswith(" installed"):
            installed.add((fields["Package"], fields["Version"], fields["Architecture"]))
    locked = {(p.name, p.version, p.architecture) for p in lock.packages}
    if installed != locked:
        lines = [f"- {' '.join(item)}" for item in sorted(locked - installed)]
        lines += [f"+ {' '.join(item)}" for item in sorted(installed - locked)]
        raise BuildError(
            "the installed packages are not those of the lock",
            hint="run `smolbuild lock --update`",
            code="packages-differ",
            details="\n".join(lines[:50]),
        )
