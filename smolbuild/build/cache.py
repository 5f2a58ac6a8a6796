"""The step cache: each step's disk delta, under the chain key of everything up to the step."""

import contextlib
import os
import tempfile
from pathlib import Path

from smolbuild.core.digest import Digest, hex_of
from smolbuild.core.files import fsync_directory, private_directory, remove_tree

__all__ = ["StepCache"]


class StepCache:
    """Disk deltas (qcow2, 64 KiB clusters) by chain key, in ``Home.cache/steps``.

    A delta lies directly over the delta of the chain key before it, the first one over the base
    disk. Entries appear whole or not at all; safe for many processes.
    """

    def __init__(self, cache: Path) -> None:
        self._root = private_directory(cache / "steps")

    def path(self, chain_key: Digest) -> Path:
        """Return where the delta of ``chain_key`` is or would be."""
        return self._root / f"{hex_of(chain_key)}.qcow2"

    def prefix(self, chain: tuple[Digest, ...]) -> int:
        """Return how many entries of ``chain``, from the first on, are all here."""
        for count, key in enumerate(chain):
            if not self.path(key).exists():
                return count
        return len(chain)

    def keep(self, chain_key: Digest, overlay: Path) -> Path:
        """Keep a finished overlay; it must not change any more. Idempotent.

        The file is shared by hard link, so that a machine that still has it open goes on
        undisturbed.

        Raises:
            OSError: the disk is full, for example.

        """
        target = self.path(chain_key)
        if target.exists():
            return target
        descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=self._root)
        os.close(descriptor)
        temporary = Path(name)
        try:
            temporary.unlink()
            os.link(overlay, temporary)
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(self._root)
        return target

    def forget(self, chain: tuple[Digest, ...]) -> None:
        """Drop the entries of ``chain``. Idempotent."""
        for key in chain:
            with contextlib.suppress(OSError):
                remove_tree(self.path(key))
