"""Keys, DSSE envelopes, Sigstore bundles, in-toto statements and their verification."""

__all__: list[str] = []
