"""First Smolfiles: from a look at a directory, a devcontainer.json or a Dockerfile."""

__all__: list[str] = []
