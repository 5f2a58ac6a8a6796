"""Reading what may or may not be there, of a project or of the host's configuration."""

from pathlib import Path

__all__ = ["read_start"]

_MAX_BYTES = 1 << 20


def read_start(path: Path) -> str:
    """Return the first MiB of a file as text; empty where there is none, or it cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
