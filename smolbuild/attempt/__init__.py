"""Restore a verified artifact, run a task in a fork, discard it."""

__all__: list[str] = []
