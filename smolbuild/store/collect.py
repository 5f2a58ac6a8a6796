"""Free what no name refers to."""

from collections.abc import Iterable

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import (
    DOCKER_LIST_TYPE,
    INDEX_TYPE,
    Descriptor,
    fallback_tag,
    parse_index,
    parse_manifest,
)
from smolbuild.store.layout import Store, is_fallback_tag

__all__ = ["collect"]


def collect(store: Store) -> int:
    """Remove every blob that no name reaches, half-written ones, and referrers without a subject.

    Waits for running builds, pushes and pulls (they hold a lease). Idempotent.

    Returns:
        The bytes freed.

    Raises:
        BusyError: a lease was held past the deadline.

    """
    with store.exclusive():
        store.sweep(older_than=0)  # whoever writes a blob holds a lease
        names = store.names()
        roots = [entry for name, entry in names.items() if not is_fallback_tag(name)]
        alive = _reach(store, roots)
        referrers = [(name, entry) for name, entry in names.items() if is_fallback_tag(name)]
        changed = True
        while changed:  # a referrer of a referrer (a signature of an attestation) stays as well
            changed = False
            for name, entry in referrers:
                if entry.digest not in alive and any(name == fallback_tag(d) for d in alive):
                    alive |= _reach(store, [entry])
                    changed = True
        store.unname(*(name for name, entry in referrers if entry.digest not in alive))
        return sum(
            store.remove_blob(digest) for digest in list(store.blobs()) if digest not in alive
        )


def _reach(store: Store, roots: Iterable[Descriptor]) -> set[Digest]:
    seen: set[Digest] = set()
    todo = list(roots)
    while todo:
        entry = todo.pop()
        if entry.digest in seen:
            continue
        seen.add(entry.digest)
        todo.extend(_children(store, entry))
    return seen


def _children(store: Store, entry: Descriptor) -> tuple[Descriptor, ...]:
    if "manifest" not in entry.media_type and "index" not in entry.media_type:
        return ()
    try:
        data = store.read(entry.digest)
        if entry.media_type in (INDEX_TYPE, DOCKER_LIST_TYPE):
            return parse_index(data).manifests
        manifest = parse_manifest(data)
    except VerificationError:
        return ()  # incomplete or damaged: it keeps nothing else alive
    return (manifest.config, *manifest.layers)
