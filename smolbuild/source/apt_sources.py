"""Which Debian archives this host uses, as one-line apt sources for any Debian suite.

apt itself reads its configuration (both formats) and says what is in it; only what it does not
say, the keyring of an entry, is looked up in the file it names. No host name stands in this code:
without Debian sources on the host, mmdebstrap's own defaults are asked for.
"""

import os
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from smolbuild.core.errors import HostError
from smolbuild.core.process import run
from smolbuild.model.smolfile import Base

__all__ = ["AptSource", "default_sources", "host_sources", "plain_environment", "sources_for"]

DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TIMEOUT = 60.0
_SUFFIXES = ("", "-updates", "-security")
_ROLLING = ("sid", "unstable")
_FORMAT = "$(REPO_URI)|$(RELEASE)|$(ORIGIN)|$(SOURCESENTRY)"
_ARCHIVE_PATHS = ("debian", "debian-security")


@dataclass(frozen=True, slots=True, kw_only=True)
class AptSource:
    """One archive and suite; ``options`` as in a one-line source (``signed-by=…``)."""

    uri: str
    suite: str
    components: tuple[str, ...]
    options: tuple[str, ...] = ()

    def line(self) -> str:
        """Return it as a line of a ``sources.list``."""
        options = f"[{' '.join(self.options)}] " if self.options else ""
        return f"deb {options}{self.uri} {self.suite} {' '.join(self.components)}"

    def public(self) -> str:
        """Return the line for the image: without keyrings of this host, without credentials."""
        parts = urllib.parse.urlsplit(self.uri)
        host = parts.netloc.rpartition("@")[2]
        uri = urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))
        return f"deb {uri} {self.suite} {' '.join(self.components)}"


def plain_environment() -> dict[str, str]:
    """Return the environment for apt and dpkg: the host's, but the C locale and no questions."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    return {**kept, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def sources_for(base: Base) -> tuple[AptSource, ...]:
    """Return where the packages of ``base`` come from.

    A mirror that the Smolfile names is used alone; else the host's own Debian sources, moved to the
    suite asked for, with its updates and security suites; else mmdebstrap's defaults.

    Raises:
        HostError: apt or mmdebstrap is missing or fails.

    """
    if base.archive is not None:
        source = _with_keyring(base.archive, base.debian, base.components)
        # An old snapshot's lists have run out of their validity; that is what it is for.
        dated = (*source.options, "check-valid-until=no") if base.snapshot else source.options
        return (replace(source, options=dated),)
    return host_sources(base) or default_sources(base)


def host_sources(base: Base) -> tuple[AptSource, ...]:
    """Return the host's Debian sources for the suite of ``base``; empty when it has none."""
    shown = run(
        ["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"],
        timeout=_TIMEOUT,
        env=plain_environment(),
    )
    found: dict[tuple[str, str], AptSource] = {}
    for line in shown.stdout.decode(errors="replace").splitlines():
        uri, release, origin, entry = (*line.split("|"), "", "", "")[:4]
        suffix = release[release.find("-") :] if "-" in release else ""
        if not _is_debian(uri, origin) or suffix not in _SUFFIXES:
            continue
        if suffix and base.debian in _ROLLING:
            continue
        suite = base.debian + suffix
        options = _entry_options(entry)
        source = AptSource(
            uri=uri.rstrip("/"), suite=suite, components=base.components, options=options
        )
        found.setdefault((source.uri, suite), source if options else _keyed(source))
    sources = tuple(found.values())
    return sources if any(source.suite == base.debian for source in sources) else ()


def default_sources(base: Base) -> tuple[AptSource, ...]:
    """Return what mmdebstrap uses for a suite when nobody names a mirror.

    Raises:
        HostError: mmdebstrap is missing or knows no default for the suite.

    """
    # The hook shows the sources and then ends the run, before anything is downloaded.
    shown = run(
        [
            "mmdebstrap",
            "--quiet",
            "--mode=chrootless",
            "--skip=check/chrootless",  # refused to root otherwise; nothing is installed here
            "--variant=custom",
            "--format=null",
            f"--components={','.join(base.components)}",
            '--setup-hook=cat "$1/etc/apt/sources.list"; exit 1',
            base.debian,
            "-",
        ],
        timeout=_TIMEOUT,
        env=plain_environment(),
    )
    # mmdebstrap keeps its standard output for the archive: what hooks write goes to the other.
    sources = tuple(_parsed(shown.stderr.decode(errors="replace"), base))
    if not sources:
        raise HostError(
            f"neither this host nor mmdebstrap knows a mirror for Debian {base.debian}",
            hint="name one with `mirror` in [smolbuild.base]",
            code="no-mirror",
            details=shown.stderr.decode(errors="replace")[-2000:],
        )
    return sources


def _parsed(text: str, base: Base) -> Iterator[AptSource]:
    for line in text.splitlines():
        match = re.fullmatch(r"deb (?:\[[^\]]*\] )?(\S+) (\S+) .+", line.strip())
        if match:
            yield _with_keyring(match[1], match[2], base.components)


def _with_keyring(uri: str, suite: str, components: tuple[str, ...]) -> AptSource:
    return _keyed(AptSource(uri=uri.rstrip("/"), suite=suite, components=components))


def _keyed(source: AptSource) -> AptSource:
    if not DEBIAN_KEYRING.exists():
        return source
    return AptSource(
        uri=source.uri,
        suite=source.suite,
        components=source.components,
        options=(f"signed-by={DEBIAN_KEYRING}",),
    )


def _is_debian(uri: str, origin: str) -> bool:
    if origin and not origin.startswith("$("):
        return origin == "Debian"
    # Without downloaded lists nobody knows the origin; the path is the same on all mirrors.
    return uri.rstrip("/").rpartition("/")[2] in _ARCHIVE_PATHS


def _entry_options(entry: str) -> tuple[str, ...]:
    """Return the trust options of the source entry ``file:number``; empty when there are none."""
    name, _, number = entry.rpartition(":")
    try:
        text = Path(name).read_text(errors="replace")
        index = int(number) - 1
    except (OSError, ValueError):
        return ()
    if name.endswith(".sources"):
        stanzas = [part for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
        if not 0 <= index < len(stanzas):
            return ()
        match = re.search(r"(?mi)^Signed-By:[ \t]*(/\S+)[ \t]*$", stanzas[index])
        trusted = re.search(r"(?mi)^Trusted:[ \t]*yes[ \t]*$", stanzas[index])
    else:
        lines = text.splitlines()
        line = lines[index] if 0 <= index < len(lines) else ""
        match = re.search(r"\bsigned-by=(/[^\s\]]+)", line)
        trusted = re.search(r"\btrusted=yes\b", line)
    keyring = (f"signed-by={match[1]}",) if match else ()
    return (*keyring, *(("trusted=yes",) if trusted else ()))
