"""Remove artifacts by name, with everything that only they needed."""

from collections.abc import Sequence
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import Descriptor
from smolbuild.store.artifact import load_artifact
from smolbuild.store.collect import collect
from smolbuild.store.layout import Store, is_internal
from smolbuild.store.materialise import forget_materialised

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
    for digest in touched - named:
        entry = next(e for e in before.values() if e.digest == digest)
        _forget(store, materialised, entry)
        store.unname(*(name for name, e in store.names().items() if e.digest == digest))
    return collect(store)


def _forget(store: Store, materialised: Path, entry: Descriptor) -> None:
    for manifest in _manifests(store, entry):
        forget_materialised(materialised, manifest)


def _manifests(store: Store, entry: Descriptor) -> list[Digest]:
    try:
        return [load_artifact(store, entry).manifest.descriptor.digest]
    except VerificationError:
        return []  # damaged: its files, if any, are found by nobody
