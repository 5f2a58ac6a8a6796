"""Choose how the events of a command are shown."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from smolbuild.core.events import Emit, silent

__all__ = ["progress"]


@contextlib.contextmanager
def progress(kind: str, environment: Mapping[str, str] = os.environ) -> Iterator[Emit]:
    """Give the ``Emit`` for ``--progress kind`` (``auto``, ``plain``, ``json``, ``none``).

    ``auto`` is live on a terminal that can move its cursor, and plain lines elsewhere and in CI.
    When the block ends, with an error or without, nothing is left half drawn.
    """
    if kind == "none":
        yield silent
        return
    with contextlib.ExitStack() as stack:
        if kind == "json":
            from smolbuild.cli.render.jsonlines import JsonLines

            yield stack.enter_context(contextlib.closing(JsonLines(sys.stderr)))
        elif kind == "auto" and _is_live(environment):
            from smolbuild.cli.render.live import live_display

            yield stack.enter_context(live_display(sys.stderr, environment))
        else:
            from smolbuild.cli.render.plain import PlainLines

            github = environment.get("GITHUB_ACTIONS") == "true"
            yield stack.enter_context(contextlib.closing(PlainLines(sys.stderr, github=github)))


def _is_live(environment: Mapping[str, str]) -> bool:
    return (
        sys.stderr.isatty()
        and environment.get("TERM", "") not in {"", "dumb"}
        and not environment.get("CI")
    )
