"""The guest agent's source, and the digest by which two hosts agree on what they built.

Apart from what compiles it, because every plan needs the digest and few builds the compiler.
"""

import functools
import re
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes, digest_value
from smolbuild.core.errors import HostError

__all__ = ["agent_digest", "agent_sources"]


def agent_sources() -> tuple[Path, ...]:
    """Return the agent's C files and headers, sorted by name."""
    here = Path(__file__).parent
    return tuple(sorted(p for p in here.iterdir() if p.suffix in {".c", ".h"}))


@functools.cache
def agent_digest() -> Digest:
    """Return the digest of the agent's source and protocol version: equal on every host.

    The protocol version is part of the source (``PROTOCOL_VERSION`` in ``agent.h``) and named on
    its own so that a reader of the key tree sees it.
    """
    sources = agent_sources()
    return digest_value(
        "smolbuild.agent.v1",
        {
            "protocol": _protocol_version(),
            "sources": [[path.name, digest_bytes(path.read_bytes())] for path in sources],
        },
    )


def _protocol_version() -> int:
    header = (Path(__file__).parent / "agent.h").read_text(encoding="utf-8")
    found = re.search(r"^#define PROTOCOL_VERSION (\d+)$", header, re.MULTILINE)
    if found is None:
        raise HostError("agent.h names no PROTOCOL_VERSION: smolbuild's installation is damaged")
    return int(found[1])
