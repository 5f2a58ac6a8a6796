"""The click commands: the only place that prints or exits."""

__all__: list[str] = []
