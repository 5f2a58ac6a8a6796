"""Where smolbuild keeps its state (``SMOLBUILD_HOME``)."""

from collections.abc import Mapping
from pathlib import Path

from smolbuild.core.files import private_directory
from smolbuild.core.values import dataclass

__all__ = ["Home", "open_home"]


@dataclass(frozen=True, slots=True)
class Home:
    """The state directory and its parts; every directory is created 0700 on first use."""

    root: Path

    @property
    def store(self) -> Path:
        """The local OCI image layout."""
        return private_directory(self.root / "store")

    @property
    def materialised(self) -> Path:
        """Verified, decompressed, sparse artifacts, one directory per manifest digest."""
        return private_directory(self.root / "materialised")

    @property
    def cache(self) -> Path:
        """Base disks, kernels, pulled images, packages, step deltas; safe to delete when idle."""
        return private_directory(self.root / "cache")

    @property
    def keys(self) -> Path:
        """Signing keys, each 0600."""
        return private_directory(self.root / "keys")

    @property
    def run(self) -> Path:
        """One directory per running machine, swept when its owner is gone."""
        return private_directory(self.root / "run")

    @property
    def locks(self) -> Path:
        """Lock files of builds and caches."""
        return private_directory(self.root / "locks")


def open_home(environment: Mapping[str, str]) -> Home:
    """Return the home named by ``SMOLBUILD_HOME``, or the platform's default data directory."""
    named = environment.get("SMOLBUILD_HOME")
    if named:
        return Home(private_directory(Path(named).absolute()))
    import platformdirs

    return Home(private_directory(Path(platformdirs.user_data_dir("smolbuild", appauthor=False))))
