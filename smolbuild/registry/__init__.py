"""OCI distribution transport on top of oras."""

__all__: list[str] = []
