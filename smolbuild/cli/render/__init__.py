"""Events on standard error: live on a terminal, plain lines in CI, or JSON lines."""

from smolbuild.cli.render.progress import progress

__all__ = ["progress"]
