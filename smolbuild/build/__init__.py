"""Plan, steps, health, gate and publishing: from a Smolfile to a proven, signed artifact."""

__all__: list[str] = []
