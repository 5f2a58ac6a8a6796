"""Pure values: the Smolfile, the provenance key, the artifact config, ids and references."""

__all__: list[str] = []
