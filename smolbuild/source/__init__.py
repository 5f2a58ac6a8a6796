"""From a base image or Debian suite to a deterministic root disk, and the kernel."""

__all__: list[str] = []
