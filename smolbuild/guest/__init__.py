"""The guest agent (C) and the initramfs that carries it."""

__all__: list[str] = []
