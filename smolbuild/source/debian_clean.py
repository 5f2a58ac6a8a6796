"""Take out of a fresh Debian root what belongs to one machine, one host or one moment.

Random seeds, keys and ids would be the same in every machine made from the root; logs, caches and
copies of the host's files would make two builds of one lock differ. What the guest needs of these
it makes at its own start.
"""

from collections.abc import Sequence

from smolbuild.model.lock import LockedDebian
from smolbuild.source.content import EMPTY_CONTENT
from smolbuild.source.deb_archive import CachedDeb
from smolbuild.source.tree import Kind, Node, Tree

__all__ = ["clean_root"]

_EMPTIED = (
    b"dev", b"proc", b"sys", b"run", b"tmp", b"var/tmp", b"var/cache/apt", b"var/cache/man",
    b"var/lib/apt/lists",
)  # fmt: skip
"""Directories that stay, without content."""

_REMOVED = (
    b"etc/hostname",  # a copy of the host's, like the next
    b"etc/resolv.conf",
    b"etc/apt/apt.conf.d/99mmdebstrap",
    b"etc/dpkg/dpkg.cfg.d/99mmdebstrap",
    b"etc/apt/sources.list.d/0000sources.list",
    b"etc/postgresql-common/createcluster.d/smolbuild.conf",
    b"etc/ssl/certs/ssl-cert-snakeoil.pem",
    b"etc/ssl/private/ssl-cert-snakeoil.key",
    b"var/cache/ldconfig/aux-cache",
    b"var/cache/debconf/config.dat-old",
    b"var/cache/debconf/templates.dat-old",
    b"var/lib/dbus/machine-id",
    b"var/lib/dpkg/status-old",
    b"var/lib/dpkg/diversions-old",
    b"var/lib/dpkg/statoverride-old",
    b"var/lib/dpkg/lock",
    b"var/lib/dpkg/lock-frontend",
    b"var/lib/dpkg/triggers/Lock",
    b"var/lib/systemd/catalog/database",
    b"var/lib/systemd/credential.secret",
    b"var/lib/systemd/random-seed",
    b"var/lib/urandom/random-seed",
)
_BASIC = ("required", "important")
_SNAKEOIL = b"ssl-cert-snakeoil.pem"


def clean_root(
    tree: Tree,
    lock: LockedDebian,
    packages: Sequence[CachedDeb],
    *,
    sources: Sequence[str],
    epoch: int,
) -> None:
    """Normalise the root in ``tree``. Idempotent.

    Args:
        tree: what mmdebstrap made; changed in place.
        lock: what was asked for, to tell chosen packages from those that came along.
        packages: the installed packages.
        sources: lines of the image's own ``sources.list``.
        epoch: newest time that any file may have, in seconds.

    """
    for path in _EMPTIED:
        node = tree.find(path)
        if node is not None:
            node.children.clear()
    for path in _REMOVED:
        tree.remove(path)
    _remove_keys(tree)
    if not _lock_has(lock, "postgresql-common"):
        tree.remove(b"etc/postgresql-common")
    if tree.find(b"etc/machine-id") is not None:  # empty: to be set at the first start
        tree.put(b"etc/machine-id", b"", mode=0o444, mtime=epoch)
    _empty_logs(tree.find(b"var/log"))
    if tree.find(b"etc/apt") is not None:
        text = "".join(line + "\n" for line in sources)
        tree.put(b"etc/apt/sources.list", text.encode(), mtime=epoch)
    if tree.find(b"var/lib/apt") is not None:
        states = _extended_states(lock, packages)
        tree.put(b"var/lib/apt/extended_states", states, mtime=epoch)
    for _, node in tree.walk():
        node.mtime = min(node.mtime, epoch)


def _lock_has(lock: LockedDebian, name: str) -> bool:
    return any(package.name == name for package in lock.packages)


def _remove_keys(tree: Tree) -> None:
    """Remove host keys of SSH and what points to the certificate that is removed above."""
    for directory, unwanted in (
        (b"etc/ssh", lambda name, _: name.startswith(b"ssh_host_")),
        (b"etc/ssl/certs", lambda _, node: node.target.rpartition(b"/")[2] == _SNAKEOIL),
    ):
        found = tree.find(directory)
        if found is not None and found.kind is Kind.DIRECTORY:
            for name in [n for n, node in found.children.items() if unwanted(n, node)]:
                del found.children[name]


def _empty_logs(logs: Node | None) -> None:
    """Empty the logs that packages ship or expect, and drop those of the installation."""
    if logs is None or logs.kind is not Kind.DIRECTORY:
        return
    for name in (b"bootstrap.log", b"dpkg.log", b"alternatives.log", b"fontconfig.log"):
        logs.children.pop(name, None)
    apt = logs.children.get(b"apt")
    if apt is not None:
        apt.children.clear()
    pending = [logs]
    while pending:
        for node in pending.pop().children.values():
            if node.kind is Kind.DIRECTORY:
                pending.append(node)
            elif node.kind is Kind.FILE:
                node.content = EMPTY_CONTENT


def _extended_states(lock: LockedDebian, packages: Sequence[CachedDeb]) -> bytes:
    """Return apt's marks: what nobody asked for came along and may be removed again.

    mmdebstrap was given every package by name, which marks all of them as chosen.
    """
    chosen = {name.partition("=")[0].partition("/")[0].partition(":")[0] for name in lock.requested}
    lines = []
    for package in packages:
        fields = package.deb.fields
        name = fields.get("Package", "")
        basic = fields.get("Essential") == "yes" or fields.get("Priority") in _BASIC
        if name not in chosen and not basic:
            architecture = fields.get("Architecture", "")
            if architecture == "all":
                architecture = lock.architecture
            lines.append(f"Package: {name}\nArchitecture: {architecture}\nAuto-Installed: 1\n\n")
    return "".join(sorted(lines)).encode()
