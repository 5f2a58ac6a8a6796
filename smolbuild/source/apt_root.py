"""A private apt: its own sources, lists and empty package state, the host's way to the network.

Nothing of the host's apt is changed and no privilege is needed. Of the host's configuration only
the ``Acquire`` part is taken over (proxies, certificates, credentials), none of its hooks.
"""

import re
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from smolbuild.core.digest import digest_bytes, hex_of
from smolbuild.core.errors import BuildError, HostError
from smolbuild.core.files import private_directory, write_atomic
from smolbuild.core.process import Completed, run
from smolbuild.model.lock import LockedPackage
from smolbuild.source.apt_sources import AptSource, plain_environment

__all__ = ["PrivateApt"]

ARCHITECTURE = "amd64"
_UPDATE_TIMEOUT = 300.0
_QUERY_TIMEOUT = 120.0
_DOWNLOAD_TIMEOUT = 1800.0
_BATCH = 200
_URI_LINE = re.compile(r"'([^']+)' (\S+)_(\S+)_(\S+)\.deb \d+ SHA256:([0-9a-f]{64})")


class PrivateApt:
    """apt over ``sources``, with its state in a directory below ``cache`` that is kept."""

    def __init__(self, sources: Sequence[AptSource], cache: Path) -> None:
        self._sources = tuple(sources)
        text = "".join(source.line() + "\n" for source in sources)
        name = hex_of(digest_bytes(text.encode()))[:16]
        self.directory = private_directory(private_directory(cache / "apt") / name)
        for part in ("state/lists/partial", "cache/archives/partial", "etc/parts", "log"):
            private_directory(self.directory / part)
        write_atomic(self.directory / "etc/sources.list", text.encode())
        write_atomic(self.directory / "state/status", b"")
        self._config = self.directory / "etc/apt.conf"
        write_atomic(self._config, self._configuration())

    def update(self) -> None:
        """Fetch the package lists; unchanged ones are not fetched again. Idempotent.

        Raises:
            HostError: a list cannot be fetched or its signature is not trusted.

        """
        done = self._apt(["apt-get", "update", "-qq", "--error-on=any"], _UPDATE_TIMEOUT)
        if done.status != 0:
            text = _tail(done)
            missing_key = "NO_PUBKEY" in text or "not signed" in text
            raise HostError(
                "the package lists of Debian cannot be fetched from "
                + ", ".join(sorted({source.uri for source in self._sources})),
                hint="install the package debian-archive-keyring"
                if missing_key
                else "check the network, the suite's name and the host's apt configuration",
                code="apt-update",
                details=text,
            )

    def closure(self, wanted: Sequence[str]) -> tuple[LockedPackage, ...]:
        """Return every package that installing ``wanted`` into an empty root brings, by name.

        Raises:
            BuildError: a package does not exist or cannot be installed.

        """
        done = self._apt(
            ["apt-get", "install", "--yes", "--print-uris", "--no-install-recommends", *wanted],
            _QUERY_TIMEOUT,
        )
        if done.status != 0:
            raise BuildError(
                "apt cannot install the packages of [smolbuild.base]",
                hint="check the names in `packages`, and `components`",
                code="packages",
                details=_tail(done),
            )
        packages = [
            LockedPackage(
                name=match[2],
                version=urllib.parse.unquote(match[3]),
                architecture=match[4],
                sha256=match[5],
            )
            for match in _URI_LINE.finditer(done.stdout.decode(errors="replace"))
        ]
        if not packages:
            raise HostError("apt names no packages", details=_tail(done), code="packages")
        return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))

    def available(self, packages: Sequence[LockedPackage]) -> set[str]:
        """Return the SHA-256 of those of ``packages`` that the archive still has."""
        found: set[str] = set()
        names = sorted({package.name for package in packages})
        for at in range(0, len(names), _BATCH):
            done = self._apt(
                ["apt-cache", "show", "--all-versions", *names[at : at + _BATCH]], _QUERY_TIMEOUT
            )
            text = done.stdout.decode(errors="replace")
            found.update(re.findall(r"(?m)^SHA256: ([0-9a-f]{64})$", text))
        return found & {package.sha256 for package in packages}

    def download(self, packages: Sequence[LockedPackage], into: Path) -> None:
        """Download the ``.deb`` files of ``packages`` into the directory ``into``.

        Raises:
            HostError: the network or the archive failed.

        """
        for at in range(0, len(packages), _BATCH):
            names = [
                f"{package.name}:{ARCHITECTURE}={package.version}"
                if package.architecture != "all"
                else f"{package.name}={package.version}"
                for package in packages[at : at + _BATCH]
            ]
            done = self._apt(
                ["apt-get", "download", "-qq", *names], _DOWNLOAD_TIMEOUT, directory=into
            )
            if done.status != 0:
                raise HostError(
                    "packages cannot be downloaded",
                    hint="check the network; what has been downloaded is kept",
                    code="apt-download",
                    details=_tail(done),
                )

    def _apt(
        self, argv: Sequence[str], timeout: float, *, directory: Path | None = None
    ) -> Completed:
        environment = {**plain_environment(), "APT_CONFIG": str(self._config)}
        return run(argv, timeout=timeout, env=environment, cwd=directory or self.directory)

    def _configuration(self) -> bytes:
        host = run(["apt-config", "dump"], timeout=_QUERY_TIMEOUT, env=plain_environment())
        acquire = [
            line
            for line in host.stdout.decode(errors="replace").splitlines()
            if line.startswith("Acquire::") and '"' in line
        ]
        own = {
            "APT::Architecture": ARCHITECTURE,
            "APT::Install-Recommends": "false",
            "APT::Install-Suggests": "false",
            "APT::Sandbox::User": "root",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Acquire::ForceHash": "SHA256",
            "Acquire::http::Timeout": "30",
            "Acquire::https::Timeout": "30",
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": self.directory / "etc/parts",
            "Dir::Etc::sourcelist": self.directory / "etc/sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": self.directory / "state",
            "Dir::State::status": self.directory / "state/status",
            "Dir::Cache": self.directory / "cache",
            "Dir::Log": self.directory / "log",
            "Debug::NoLocking": "true",
        }
        lines = [
            *acquire,
            "#clear APT::Architectures;",
            f'APT::Architectures {{ "{ARCHITECTURE}"; }};',
            *(f'{key} "{value}";' for key, value in own.items()),
        ]
        return "\n".join(lines).encode() + b"\n"


def _tail(done: Completed) -> str:
    text = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace")
    return "\n".join(text.splitlines()[-50:])
