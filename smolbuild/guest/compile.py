"""Compiles our C programs, each one static program: the guest agent, and what searches for residue.

Of the agent there are two digests, on purpose. ``agent_digest`` covers the *source* and the
protocol version and goes into the provenance key, so that two hosts with different compilers agree
on what was built. A compiled program is cached by its source, the flags and the compiler's own
words about itself.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from smolbuild.core.digest import Digest, digest_value, hex_of
from smolbuild.core.errors import HostError
from smolbuild.core.files import file_lock, private_directory, write_atomic
from smolbuild.core.process import run
from smolbuild.guest.agent_source import agent_digest, agent_sources

__all__ = ["FLAGS", "build_agent", "build_program"]

FLAGS = (
    "-std=gnu11",
    "-static",
    "-Os",
    "-s",
    "-Wall",
    "-Wextra",
    "-fno-ident",
    "-fno-asynchronous-unwind-tables",
    "-ffile-prefix-map=.=agent",
    "-Wl,--build-id=none",
    "-Wl,--gc-sections",
    "-ffunction-sections",
    "-fstack-protector-strong",
)
"""Nothing here depends on the host, and no path, time or build id enters the program.

A warning is no error here: a compiler newer than those we know warns about more, and whoever builds
with it can do nothing about that. The tests compile everything with -Werror.
"""

_COMPILE_TIMEOUT = 120.0
_KEPT = 8
"""Compiled programs of one kind kept in the cache; older ones are removed."""


def build_agent(cache: Path) -> Path:
    """Return the compiled agent, compiling it into ``cache`` when it is not there yet.

    Atomic and idempotent; two builders at once wait for each other.

    Raises:
        HostError: musl-gcc is missing or the compilation failed.

    """
    return build_program(cache, "agent", agent_sources(), agent_digest(), FLAGS)


def build_program(
    cache: Path, name: str, sources: Sequence[Path], source: Digest, flags: Sequence[str]
) -> Path:
    """Return the program compiled from ``sources``, C files and headers of one directory.

    Atomic and idempotent; two builders at once wait for each other.

    Args:
        cache: ``Home.cache``; the program lies below its directory ``name``.
        name: what the program is called, for errors too.
        sources: C files and headers.
        source: digest of the sources.
        flags: of the compiler.

    Raises:
        HostError: musl-gcc is missing or the compilation failed.

    """
    directory = private_directory(cache / name)
    target = directory / hex_of(_cache_key(name, source, flags))
    if target.is_file():
        return target
    with file_lock(directory / ".lock", timeout=_COMPILE_TIMEOUT, what=f"compiling the {name}"):
        if not target.is_file():
            write_atomic(target, _compile(directory, name, sources, flags), mode=0o755)
            _forget_old(directory)
    return target


def _compile(directory: Path, name: str, sources: Sequence[Path], flags: Sequence[str]) -> bytes:
    output = directory / ".tmp-compiling"
    files = [path.name for path in sources if path.suffix == ".c"]
    try:
        done = run(
            ["musl-gcc", *flags, "-o", str(output), *files],
            timeout=_COMPILE_TIMEOUT,
            cwd=sources[0].parent,
        )
        if done.status != 0:
            said = done.stderr.decode(errors="replace")
            reason = next((line for line in said.splitlines() if "error:" in line), "")
            raise HostError(
                f"the {name} did not compile (musl-gcc exit status {done.status})"
                + (f": {reason}" if reason else ""),
                details=said[-4000:],
                hint="it takes musl-tools and gcc (on Debian or Ubuntu: apt-get install musl-tools "
                "gcc); with these in place it is a defect of smolbuild, please report it",
                code=f"{name}-compile",
            )
        return output.read_bytes()
    finally:
        output.unlink(missing_ok=True)


def _cache_key(name: str, source: Digest, flags: Sequence[str]) -> Digest:
    version = run(["musl-gcc", "--version"], timeout=20.0)
    return digest_value(
        f"smolbuild.{name}-binary.v1",
        {
            "source": source,
            "flags": list(flags),
            "compiler": version.stdout.decode(errors="replace"),
        },
    )


def _forget_old(directory: Path) -> None:
    built = [path for path in directory.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name)]
    built.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in built[_KEPT:]:
        path.unlink(missing_ok=True)
