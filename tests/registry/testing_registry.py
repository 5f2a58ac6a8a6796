"""An OCI registry in this process that can be told to misbehave, and a real one on loopback.

``FakeRegistry`` follows the distribution specification as docker-registry does it (its upload
state changes with every answer, a stale one is 404; whatever is sent gets appended), and adds the
referrers API. ``fail`` makes chosen requests go wrong in one of the ways below.
"""

import base64
import contextlib
import hashlib
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from smolbuild.core.process import kill_group, spawn

INDEX = "application/vnd.oci.image.index.v1+json"


class FakeClock:
    """A clock that never waits: sleeping moves it on, and is written down."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0
        self.slept: list[float] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept.append(seconds)
            self.time += seconds


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Fault:
    method: str
    pattern: re.Pattern[str]
    act: Callable[["Handler"], object]
    times: int


@dataclass
class FakeRegistry:
    referrers: bool = True
    oci_subject: bool | None = None
    """None: as ``referrers`` says; else whether the header is sent whatever the API does."""
    auth: str = ""
    """"" for none, ``basic`` or ``bearer``."""
    user: str = "alice"
    password: str = "wonderland-secret"
    refresh_token: str = "refresh-secret"
    etags: bool = False
    strict_ranges: bool = False
    tls: ssl.SSLContext | None = None

    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    uploads: dict[str, bytearray] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, set[str]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.registry = self  # type: ignore[attr-defined]
        if self.tls is not None:
            self.server.socket = self.tls.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}"

    def add_blob(self, repository: str, data: bytes) -> str:
        digest = _digest(data)
        self.blobs[repository, digest] = data
        return digest

    def fail(
        self, method: str, pattern: str, act: Callable[["Handler"], object], *, times: int = 1
    ) -> None:
        """Answer the next ``times`` matching requests with ``act``."""
        self.faults.append(Fault(method, re.compile(pattern), act, times))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method in (method, "*") and fault.pattern.search(path):
                    fault.times -= 1
                    return fault
        return None

    def count(self, method: str, pattern: str) -> int:
        return sum(s.method == method and bool(re.search(pattern, s.path)) for s in self.seen)

    def next(self) -> str:
        with self.lock:
            self.serial += 1
            return f"n{self.serial}"

    def expire_tokens(self) -> None:
        with self.lock:
            self.tokens.clear()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ThreadingHTTPServer
    timeout = 20
    disable_nagle_algorithm = True  # else every answer waits 40 ms for a delayed acknowledgement

    @property
    def registry(self) -> FakeRegistry:
        return self.server.registry  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
            super().handle_one_request()
            return
        self.close_connection = True

    def do_GET(self) -> None:
        self.dispatch()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def dispatch(self) -> None:
        registry = self.registry
        registry.seen.append(Seen(self.command, self.path, dict(self.headers)))
        fault = registry.take_fault(self.command, self.path)
        if fault is not None:
            fault.act(self)
            return
        self.serve()

    def serve(self) -> None:
        """Do what the specification says."""
        parts = urlsplit(self.path)
        if parts.path == "/token":
            self.token(parts.query)
            return
        if not self.allowed(parts.path):
            return
        match = re.fullmatch(
            r"/v2/(?P<repo>.+)/(?P<kind>manifests|blobs|referrers|tags)/(?P<rest>.+)", parts.path
        )
        if match is None:
            self.answer(404)
            return
        handler = getattr(self, "on_" + match["kind"])
        handler(match["repo"], unquote(match["rest"]), dict(parse_qsl(parts.query)))

    # -- answers

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.drain()
        self.send_response(status)
        fields = {"Content-Length": str(len(body)), **(headers or {})}
        for key, value in fields.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode()
        self.answer(status, body, {"Content-Type": "application/json", **(headers or {})})

    def drain(self) -> None:
        if not getattr(self, "_drained", False):
            self.body()

    def body(self, limit: int | None = None) -> bytes:
        length = int(self.headers.get("Content-Length", "0"))
        self._drained = True
        return self.rfile.read(length if limit is None else min(limit, length))

    def hang_up(self) -> None:
        self.close_connection = True
        self._drained = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def parse_request(self) -> bool:
        self._drained = False
        return super().parse_request()

    # -- authentication

    def allowed(self, path: str) -> bool:
        registry, given = self.registry, self.headers.get("Authorization", "")
        if not registry.auth:
            return True
        if registry.auth == "basic":
            if given == self.basic():
                return True
            self.refuse(401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="x, Bearer y"'})
            return False
        match = re.match(r"/v2/(.+)/(?:manifests|blobs|referrers|tags)/", path)
        repository = match[1] if match else ""
        write = self.command not in ("GET", "HEAD")
        actions = "pull,push" if write else "pull"
        granted = registry.tokens.get(given.removeprefix("Bearer "), set())
        if any(_allows(scope, repository, write) for scope in granted):
            return True
        challenge = (
            f'Bearer realm="{registry.url}/token",service="fake",'
            f'scope="repository:{repository}:{actions}"'
        )
        self.refuse(401, "UNAUTHORIZED", {"WWW-Authenticate": challenge})
        return False

    def basic(self) -> str:
        pair = f"{self.registry.user}:{self.registry.password}".encode()
        return "Basic " + base64.b64encode(pair).decode()

    def token(self, query: str) -> None:
        registry = self.registry
        if self.command == "POST":
            form = parse_qs(self.body().decode())
            ok = form.get("refresh_token") == [registry.refresh_token]
            scopes = set(form.get("scope", [""])[0].split())
        else:
            ok = self.headers.get("Authorization") == self.basic()
            scopes = set(parse_qs(query).get("scope", []))
        if not ok:
            self.refuse(401, "UNAUTHORIZED")
            return
        token = f"token-secret-{registry.next()}"
        registry.tokens[token] = scopes
        self.answer(200, json.dumps({"token": token, "expires_in": 300}).encode())

    # -- content

    def on_manifests(self, repo: str, reference: str, _: dict[str, str]) -> None:
        registry, key = self.registry, (repo, reference)
        if self.command in ("GET", "HEAD"):
            found = registry.manifests.get(key)
            if found is None:
                self.refuse(404, "MANIFEST_UNKNOWN")
                return
            media_type, data = found
            etag = {"ETag": f'"{_digest(data)}"'} if registry.etags else {}
            self.answer(
                200, data,
                {"Content-Type": media_type, "Docker-Content-Digest": _digest(data), **etag},
            )  # fmt: skip
            return
        data, digest = self.body(), ""
        digest = _digest(data)
        with registry.lock:
            wanted = self.headers.get("If-Match")
            now = registry.manifests.get(key)
            if wanted and registry.etags and (now is None or wanted != f'"{_digest(now[1])}"'):
                self.refuse(412, "CHANGED")
                return
            stored = (self.headers["Content-Type"], data)
            registry.manifests[key] = registry.manifests[repo, digest] = stored
        subject = json.loads(data).get("subject")
        tell = registry.referrers if registry.oci_subject is None else registry.oci_subject
        extra = {"OCI-Subject": subject["digest"]} if subject and tell else {}
        self.answer(201, b"", {"Docker-Content-Digest": digest, **extra})

    def on_referrers(self, repo: str, digest: str, query: dict[str, str]) -> None:
        registry = self.registry
        if not registry.referrers:
            self.answer(404, b"404 page not found\n", {"Content-Type": "text/plain"})
            return
        entries = {}
        for (name, _), (media_type, data) in list(registry.manifests.items()):
            value = json.loads(data)
            if name == repo and (value.get("subject") or {}).get("digest") == digest:
                entries[_digest(data)] = {
                    "mediaType": media_type, "digest": _digest(data), "size": len(data),
                    "artifactType": value.get("artifactType"),
                    "annotations": value.get("annotations") or {},
                }  # fmt: skip
        wanted = query.get("artifactType")
        listed = [e for e in entries.values() if wanted in (None, e["artifactType"])]
        extra = {"OCI-Filters-Applied": "artifactType"} if wanted else {}
        body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}).encode()
        self.answer(200, body, {"Content-Type": INDEX, **extra})

    def on_tags(self, repo: str, _: str, query: dict[str, str]) -> None:
        tags = sorted(r for n, r in self.registry.manifests if n == repo and ":" not in r)
        if not tags:
            self.refuse(404, "NAME_UNKNOWN")
            return
        page = [tag for tag in tags if tag > query.get("last", "")]
        more = {"Link": f'</v2/{repo}/tags/list?last={page[1]}>; rel="next"'} if page[2:] else {}
        self.answer(200, json.dumps({"name": repo, "tags": page[:2]}).encode(), more)

    def on_blobs(self, repo: str, rest: str, query: dict[str, str]) -> None:
        if rest.startswith("uploads/"):
            self.on_upload(repo, rest.removeprefix("uploads/"), query)
            return
        data = self.registry.blobs.get((repo, rest))
        if data is None:
            self.refuse(404, "BLOB_UNKNOWN")
            return
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if span is None:
            self.answer(200, data, {"Docker-Content-Digest": rest})
            return
        start = int(span[1])
        if start >= len(data):
            self.answer(416)
            return
        content_range = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206, data[start:], {"Content-Range": content_range})

    def on_upload(self, repo: str, name: str, query: dict[str, str]) -> None:
        registry = self.registry
        if self.command == "POST" and not name:
            source = registry.blobs.get((query.get("from", ""), query.get("mount", "")))
            if source is not None:
                registry.blobs[repo, query["mount"]] = source
                self.answer(201)
                return
            name = registry.next()
            registry.uploads[name] = bytearray()
            self.progress(repo, name, 202)
            return
        upload = registry.uploads.get(name)
        if upload is None or query.get("_state") != registry.states.get(name):
            self.refuse(404, "BLOB_UPLOAD_UNKNOWN")
        elif self.command == "GET":
            self.progress(repo, name, 204)
        elif self.command == "DELETE":
            del registry.uploads[name]
            self.answer(204)
        elif self.command == "PATCH":
            start = int(self.headers.get("Content-Range", "0-").partition("-")[0])
            if registry.strict_ranges and start != len(upload):
                self.refuse(416, "RANGE_INVALID")
                return
            upload += self.body()
            self.progress(repo, name, 202)
        else:
            upload += self.body()
            self.commit(repo, name, query["digest"])

    def commit(self, repo: str, name: str, digest: str) -> None:
        data = bytes(self.registry.uploads.pop(name))
        if _digest(data) != digest:
            self.refuse(400, "DIGEST_INVALID")
            return
        self.registry.blobs[repo, digest] = data
        self.answer(201, b"", {"Docker-Content-Digest": digest})

    def progress(self, repo: str, name: str, status: int) -> None:
        registry = self.registry
        registry.states[name] = registry.next()
        done = max(0, len(registry.uploads[name]) - 1)
        location = f"/v2/{repo}/blobs/uploads/{name}?_state={registry.states[name]}"
        self.answer(status, b"", {"Location": location, "Range": f"0-{done}"})


# -- faults


def status(code: int, error: str = "", **headers: str) -> Callable[[Handler], None]:
    """Answer with a status and nothing else."""
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda h: h.refuse(code, error, fields) if error else h.answer(code, b"", fields)


def body(data: bytes, code: int = 200, **headers: str) -> Callable[[Handler], None]:
    """Answer with these bytes."""
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda h: h.answer(code, data, fields)


def hang_up(handler: Handler) -> None:
    """Close the connection without a word."""
    handler.hang_up()


def cut_down(after: int) -> Callable[[Handler], None]:
    """Promise the whole blob, send ``after`` bytes of it and hang up."""

    def act(h: Handler) -> None:
        real = h.wfile

        class Cutting:
            left = after
            in_body = False

            def write(self, data: bytes) -> int:
                if not self.in_body:
                    real.write(data)
                    self.in_body = data.endswith(b"\r\n\r\n")
                    return len(data)
                real.write(data[: self.left])
                h.hang_up()
                return len(data)

            def flush(self) -> None:
                real.flush()

        h.wfile = Cutting()  # type: ignore[assignment]
        try:
            h.serve()
        finally:
            h.wfile = real

    return act


def cut_up(after: int) -> Callable[[Handler], None]:
    """Take ``after`` bytes of an upload and hang up."""

    def act(h: Handler) -> None:
        name = urlsplit(h.path).path.rpartition("/")[2]
        h.registry.uploads[name] += h.body(after)
        h.hang_up()

    return act


def lose_answer(h: Handler) -> None:
    """Do what was asked, and hang up instead of answering."""

    def silent(*_: object, **__: object) -> None:
        h.drain()
        h.hang_up()

    h.answer = silent  # type: ignore[method-assign]
    try:
        h.serve()
    finally:
        del h.answer


def chunked(data: bytes, **headers: str) -> Callable[[Handler], None]:
    """Send a body without saying how long it is, ended properly."""

    def act(h: Handler) -> None:
        h.send_response(200)
        for key, value in headers.items():
            h.send_header(key.replace("_", "-"), value)
        h.send_header("Transfer-Encoding", "chunked")
        h.end_headers()
        for start in range(0, len(data), 50_000):
            piece = data[start : start + 50_000]
            h.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        h.wfile.write(b"0\r\n\r\n")

    return act


def drip_head(h: Handler) -> None:
    """Send a head one byte at a time, for ever."""
    h.close_connection = True
    h.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not h.registry.closing.wait(0.02):
        h.wfile.write(b"z")


def drip_body(h: Handler) -> None:
    """Promise much and send one byte at a time, for ever."""
    h.close_connection = True
    h.send_response(200)
    h.send_header("Content-Length", str(1_000_000))
    h.send_header("Content-Type", INDEX)
    h.end_headers()
    while not h.registry.closing.wait(0.02):
        h.wfile.write(b"z")


def never_answer(h: Handler) -> None:
    """Accept the request and say nothing until the registry closes."""
    h.close_connection = True
    h.registry.closing.wait(60)


def _allows(scope: str, repository: str, write: bool) -> bool:
    kind, name, actions = scope.split(":")
    needed = {"pull", "push"} if write else {"pull"}
    return kind == "repository" and name == repository and needed <= set(actions.split(","))


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# -- Debian's docker-registry


@contextlib.contextmanager
def docker_registry(directory: Path, *, patience: float = 20.0) -> Iterator[str]:
    """Run a real registry on a free loopback port with its data below ``directory``; give its host.

    It dies with this process, and is stopped when the block ends.
    """
    for _ in range(5):  # another process may take the free port between the look and the start
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            host = f"127.0.0.1:{probe.getsockname()[1]}"
        config = directory / "registry.yml"
        config.write_text(
            json.dumps(  # JSON is YAML
                {
                    "version": "0.1",
                    "log": {"level": "error", "accesslog": {"disabled": True}},
                    "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
                    "http": {"addr": host},
                }
            )
        )
        child = spawn(["docker-registry", "serve", str(config)], stdout=subprocess.DEVNULL)
        try:
            if _answers(host, child, patience):
                yield host
                return
        finally:
            kill_group(child)
    raise AssertionError("docker-registry did not start")


def _answers(host: str, child: subprocess.Popen[bytes], patience: float) -> bool:
    name, _, port = host.partition(":")
    deadline = time.monotonic() + patience
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((name, int(port)), 1):
            return True
        time.sleep(0.02)
    return False
