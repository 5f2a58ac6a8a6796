"""A Debian archive of exactly the locked packages, served to mmdebstrap over the loopback.

mmdebstrap can then install nothing but the locked set, needs no network, and works the same in
every mode (its user namespaces cannot see a private cache directory, but can see the loopback).
"""

import contextlib
import hashlib
import http.server
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from smolbuild.model.lock import LockedDebian
from smolbuild.source.deb import Deb

__all__ = ["CachedDeb", "serve_archive"]

_READ = 1 << 20
_IDLE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDeb:
    """A package in the cache, with its control data."""

    path: Path
    sha256: str
    deb: Deb


@contextlib.contextmanager
def serve_archive(lock: LockedDebian, packages: Sequence[CachedDeb]) -> Iterator[str]:
    """Serve an archive of ``packages`` and give its URI; it is gone when the block ends."""
    files = _archive(lock, packages)
    prefix = f"/{secrets.token_hex(16)}/"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            found = files.get(self.path.removeprefix(prefix)) if self._ours() else None
            if found is None:
                # Not send_error, which closes the connection under requests apt has sent ahead.
                self.send_response(HTTPStatus.NOT_FOUND)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = len(found) if isinstance(found, bytes) else found.stat().st_size
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if isinstance(found, bytes):
                self.wfile.write(found)
                return
            with found.open("rb") as stream:
                while chunk := stream.read(_READ):
                    self.wfile.write(chunk)

        def _ours(self) -> bool:
            return self.path.startswith(prefix)

        def log_message(self, *_args: object) -> None:
            """Print nothing: a library never does."""

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="deb archive")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix.rstrip('/')}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_args: object) -> None:
        """Say nothing when a client goes away: apt reports what matters."""


def _archive(lock: LockedDebian, packages: Sequence[CachedDeb]) -> Mapping[str, bytes | Path]:
    files: dict[str, bytes | Path] = {}
    stanzas = []
    for package in packages:
        name = f"pool/{package.sha256}.deb"
        files[name] = package.path
        size = package.path.stat().st_size
        stanzas.append(
            f"{package.deb.control}\nFilename: {name}\nSize: {size}\nSHA256: {package.sha256}\n"
        )
    index = "\n".join(stanzas).encode()
    place = f"main/binary-{lock.architecture}/Packages"
    digest = hashlib.sha256(index).hexdigest()
    release = (
        f"Origin: smolbuild\nLabel: smolbuild\nSuite: {lock.suite}\nCodename: {lock.suite}\n"
        f"Date: Thu, 01 Jan 1970 00:00:00 UTC\nArchitectures: {lock.architecture}\n"
        f"Components: main\nSHA256:\n {digest} {len(index)} {place}\n"
    ).encode()
    files[f"dists/{lock.suite}/Release"] = release
    files[f"dists/{lock.suite}/{place}"] = index
    return files
