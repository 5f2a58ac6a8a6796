"""Environments of commands: name and value, in order."""

__all__ = ["merge_env"]


def merge_env(
    base: tuple[tuple[str, str], ...], *over: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Return ``base`` with each later environment laid over it; first positions are kept."""
    merged = dict(base)
    for layer in over:
        merged.update(layer)
    return tuple(merged.items())
