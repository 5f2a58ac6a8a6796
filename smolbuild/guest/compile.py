"""Compiles the guest agent: one static program, from the C files beside this module.

Two digests, on purpose. ``agent_digest`` covers the *source* and the protocol version and goes
into the provenance key, so that two hosts with different compilers agree on what was built. The
compiled program is cached by that digest, the flags and the compiler's own words about itself.
"""

import re
from pathlib import Path

from smolbuild.core.digest import Digest, digest_value, hex_of
from smolbuild.core.errors import HostError
from smolbuild.core.files import file_lock, private_directory, write_atomic
from smolbuild.core.process import run
from smolbuild.guest.agent_source import agent_digest, agent_sources

__all__ = ["FLAGS", "build_agent"]

FLAGS = (
    "-std=gnu11",
    "-static",
    "-Os",
    "-s",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fno-ident",
    "-fno-asynchronous-unwind-tables",
    "-ffile-prefix-map=.=agent",
    "-Wl,--build-id=none",
    "-Wl,--gc-sections",
    "-ffunction-sections",
    "-fstack-protector-strong",
)
"""Nothing here depends on the host, and no path, time or build id enters the program."""

_COMPILE_TIMEOUT = 120.0
_KEPT = 8
"""Compiled agents kept in the cache; older ones are removed."""


def build_agent(cache: Path) -> Path:
    """Return the compiled agent, compiling it into ``cache`` when it is not there yet.

    Atomic and idempotent; two builders at once wait for each other.

    Raises:
        HostError: musl-gcc is missing or the compilation failed.

    """
    directory = private_directory(cache / "agent")
    name = hex_of(_cache_key())
    target = directory / name
    if target.is_file():
        return target
    with file_lock(directory / ".lock", timeout=_COMPILE_TIMEOUT, what="the agent's compilation"):
        if not target.is_file():
            write_atomic(target, _compile(directory), mode=0o755)
            _forget_old(directory)
    return target


def _compile(directory: Path) -> bytes:
    output = directory / ".tmp-compiling"
    here = Path(__file__).parent
    sources = [path.name for path in agent_sources() if path.suffix == ".c"]
    try:
        done = run(
            ["musl-gcc", *FLAGS, "-o", str(output), *sources], timeout=_COMPILE_TIMEOUT, cwd=here
        )
        if done.status != 0:
            raise HostError(
                f"the guest agent did not compile (musl-gcc exit status {done.status})",
                details=done.stderr.decode(errors="replace")[-4000:],
                hint="on Debian or Ubuntu: apt-get install musl-tools gcc",
                code="agent-compile",
            )
        return output.read_bytes()
    finally:
        output.unlink(missing_ok=True)


def _cache_key() -> Digest:
    version = run(["musl-gcc", "--version"], timeout=20.0)
    return digest_value(
        "smolbuild.agent-binary.v1",
        {
            "source": agent_digest(),
            "flags": list(FLAGS),
            "compiler": version.stdout.decode(errors="replace"),
        },
    )


def _forget_old(directory: Path) -> None:
    built = [path for path in directory.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name)]
    built.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in built[_KEPT:]:
        path.unlink(missing_ok=True)
