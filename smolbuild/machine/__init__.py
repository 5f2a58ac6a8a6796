"""The microVM: boot, exec, checkpoint, restore, fork."""

__all__: list[str] = []
