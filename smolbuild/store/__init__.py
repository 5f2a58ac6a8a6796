"""The local OCI image layout, chunked streams and materialised artifacts."""

__all__: list[str] = []
