"""What must not be left in an artifact: how secrets look in bytes, and the search for them."""

__all__: list[str] = []
