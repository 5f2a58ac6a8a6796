"""smolbuild: a compiler for environments.

A Smolfile declares a whole Linux virtual machine; ``smolbuild build`` turns it into a proven,
signed environment artifact in an OCI registry, and a worker restores copy-on-write forks of it by
digest.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
