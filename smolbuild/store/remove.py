"""Remove artifacts by name, with everything that only they needed."""

from collections.abc import Sequence
from pathlib import Path

from smolbuild.store.collect import collect
from smolbuild.store.layout import Store, is_internal
from smolbuild.store.materialise import (
    forget_materialised,
    materialised_digests,
)

__all__ = ["remove_names"]


def remove_names(store: Store, materialised: Path, names: Sequence[str]) -> int:
    """Forget ``names`` and free what no other name needs: blobs, key names, materialised files.

    Idempotent; unknown names are fine.

    Returns:
        The bytes freed in the store.

    Raises:
        BusyError: a build, push or pull holds the store for too long; the names are gone already.

    """
    before = store.names()
    touched = {before[name].digest for name in names if name in before}
    store.unname(*names)
    named = {entry.digest for name, entry in store.names().items() if not is_internal(name)}
    gone = touched - named
    store.unname(*(name for name, entry in store.names().items() if entry.digest in gone))
    freed = collect(store)
    # Whatever is materialised without its manifest in the store belongs to nothing any more.
    for digest in materialised_digests(materialised):
        if not store.has(digest):
            forget_materialised(materialised, digest)
    return freed
