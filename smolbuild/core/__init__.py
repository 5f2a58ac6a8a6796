"""The lowest layer: errors, canonical JSON, digests, files, processes, clock and events."""

__all__: list[str] = []
