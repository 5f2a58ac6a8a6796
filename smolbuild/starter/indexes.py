"""Which hosts this host's own configuration fetches packages from; nothing is guessed."""

import configparser
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from smolbuild.starter.reading import read_start

__all__ = ["index_hosts"]

_NPM_REGISTRY = re.compile(r"^\s*(?:@[^:\s]+:)?registry\s*=\s*(\S+)", re.MULTILINE)
_CARGO_SOURCE = re.compile(r"^\s*(?:registry|index)\s*=\s*[\"']([^\"']+)", re.MULTILINE)


def index_hosts(kind: str, directory: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the package index of ``kind`` (python, node, go, rust), if any is named.

    Reads pip's, npm's and cargo's configuration files and variables, and Go's variable, as those
    programs do; credentials in them are not looked at. Unreadable files are as none.
    """
    urls = {"python": _pip, "node": _npm, "go": _go, "rust": _cargo}.get(kind)
    if urls is None:
        return ()
    hosts = (_host(url) for url in urls(directory, environment))
    return tuple(dict.fromkeys(host for host in hosts if host))


def _host(url: str) -> str:
    try:
        parts = urlsplit(url.removeprefix("sparse+"))
        host = parts.hostname or ""
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[a-z0-9.-]+", host):
        return ""
    return host


def _pip(directory: Path, environment: Mapping[str, str]) -> Iterator[str]:
    del directory
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        yield from environment.get(name, "").split()
    home = Path(environment.get("HOME", "/nonexistent"))
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    named = environment.get("PIP_CONFIG_FILE")
    files = [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    for path in [*files, *([Path(named)] if named else [])]:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(read_start(path))
        except configparser.Error:
            continue
        for section in ("global", "install"):
            for option in ("index-url", "extra-index-url"):
                yield from parser.get(section, option, fallback="").split()


def _npm(directory: Path, environment: Mapping[str, str]) -> Iterator[str]:
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        yield environment.get(name, "")
    home = Path(environment.get("HOME", "/nonexistent"))
    for path in (directory / ".npmrc", home / ".npmrc", Path("/etc/npmrc")):
        for match in re.finditer(
            r"^\s*(?:@[^:\s]+:)?registry\s*=\s*(\S+)", read_start(path), re.MULTILINE
        ):
            yield match[1].strip("\"'")


def _go(directory: Path, environment: Mapping[str, str]) -> Iterator[str]:
    del directory
    yield from re.split("[,|]", environment.get("GOPROXY", ""))


def _cargo(directory: Path, environment: Mapping[str, str]) -> Iterator[str]:
    home = Path(environment.get("HOME", "/nonexistent"))
    cargo = Path(environment.get("CARGO_HOME") or home / ".cargo")
    for path in (directory / ".cargo" / "config.toml", cargo / "config.toml"):
        yield from _CARGO_SOURCE.findall(read_start(path))
