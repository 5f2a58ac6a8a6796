"""HTTP proxy requests as values: parsed strictly, written again in one clean form.

RFC 9112 (HTTP/1.1). Nothing ambiguous is passed on: whatever two readers could frame differently
(folded headers, repeated lengths, chunked bodies, several requests on one connection) is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from smolbuild.machine.egress_rules import normal_host

__all__ = [
    "HEAD_LIMIT",
    "BadRequestError",
    "ProxyRequest",
    "answer",
    "parse_request",
    "parse_response",
    "tunnel_request",
]

HEAD_LIMIT = 65536
"""Bytes of a request's or response's head."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:@/?#\[\]]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_MAX_HEADERS = 128
_MAX_BODY = 1 << 40
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer",
     b"proxy-authorization", b"upgrade", b"transfer-encoding", b"expect", b"host")
)  # fmt: skip
_Header = tuple[bytes, bytes]


class BadRequestError(Exception):
    """The guest's request is refused with ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """A request for the proxy, understood."""

    method: str
    host: str
    """Normalised name or address."""
    port: int
    path: str
    """Path and query for the server; empty for CONNECT."""
    headers: tuple[_Header, ...]
    """What goes on to the server, besides ``Host``."""
    body_length: int
    expects_continue: bool
    named: str = ""
    """What ``Host`` says, where that is not ``host``: of a server known by its address alone."""

    @property
    def tunnel(self) -> bool:
        """Whether this is CONNECT."""
        return self.method == "CONNECT"

    @property
    def url(self) -> str:
        """The URL without its query (which may hold a secret); empty for CONNECT."""
        if self.tunnel:
            return ""
        return f"http://{self.authority(80)}{self.path.partition('?')[0]}"

    def authority(self, default_port: int = 0, *, host: str = "") -> str:
        """Return ``host:port``, without the port if it is the default one."""
        name = host or self.host
        shown = f"[{name}]" if ":" in name else name
        return shown if self.port == default_port else f"{shown}:{self.port}"

    def head(self, *, absolute_host: str = "", extra: tuple[_Header, ...] = ()) -> bytes:
        """Return the head for the server; for a further proxy with ``absolute_host`` in its URL."""
        target = self.path
        if absolute_host:
            target = f"http://{self.authority(80, host=absolute_host)}{self.path}"
        lines = [
            f"{self.method} {target} HTTP/1.1".encode("ascii"),
            f"Host: {self.named or self.authority(80)}".encode("ascii"),
            *(name + b": " + value for name, value in (*self.headers, *extra)),
            b"Connection: close",
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def tunnel_request(host: str, port: int) -> ProxyRequest:
    """Return the CONNECT that a connection to ``host``, normalised, amounts to."""
    return ProxyRequest(
        method="CONNECT", host=host, port=port, path="", headers=(), body_length=0,
        expects_continue=False,
    )  # fmt: skip


def parse_request(head: bytes, *, origin: str | None = None) -> ProxyRequest:
    """Parse the head of a request, its final empty line included.

    Args:
        head: as it came.
        origin: the normalised host to whose port 80 it was sent; None: it was sent to the proxy.

    Raises:
        BadRequestError: it is malformed or ambiguous, or not meant for a proxy.

    """
    first, headers = _split(head, lambda text: BadRequestError(400, text))
    parts = first.split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise BadRequestError(400, "malformed request line")
    if parts[2] not in {b"HTTP/1.1", b"HTTP/1.0"}:
        raise BadRequestError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    method, target = parts[0].decode("ascii"), parts[1].decode("ascii")
    named = ""
    if origin is not None and target.startswith("/"):
        host, port, named = _origin(headers, origin)
        path = target.partition("#")[0]
    elif method == "CONNECT":
        host, port = _authority(target, None)
        path = ""
    elif target[:7].lower() == "http://":
        end = next((i for i, c in enumerate(target[7:], 7) if c in "/?#"), len(target))
        host, port = _authority(target[7:end], 80)
        path = target[end:].partition("#")[0]
        path = path if path.startswith("/") else f"/{path}"
    else:
        raise BadRequestError(400, "this is a proxy: ask for http://host/path or CONNECT host:port")
    return ProxyRequest(
        method=method,
        host=host,
        port=port,
        path=path,
        headers=_end_to_end(headers),
        body_length=0 if method == "CONNECT" else _body_length(headers),
        expects_continue=any(
            name.lower() == b"expect" and value.lower() == b"100-continue"
            for name, value in headers
        ),
        named=named,
    )


def parse_response(head: bytes, method: str) -> tuple[int, bytes, int | None]:
    """Return status, cleaned head and body length (None: until the server closes) of a response.

    Raises:
        BadRequestError: status 502, the server's head is malformed.

    """
    first, headers = _split(head, lambda text: BadRequestError(502, f"the server sent a {text}"))
    match = re.fullmatch(rb"HTTP/1\.[01] ([1-9][0-9]{2})( [\t\x20-\x7e\x80-\xff]*)?", first)
    if match is None:
        raise BadRequestError(502, "the server sent no HTTP/1 status line")
    status = int(match[1])
    lengths = {value for name, value in headers if name.lower() == b"content-length"}
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    length: int | None = None
    if method == "HEAD" or status in {204, 304} or status < 200:
        length = 0
    elif not chunked and lengths:
        length = _number(lengths, lambda text: BadRequestError(502, f"the server sent a {text}"))
    kept = [
        name + b": " + value
        for name, value in headers
        if name.lower() not in {b"connection", b"keep-alive", b"proxy-connection"}
    ]
    lines = [b"HTTP/1.1 " + first.partition(b" ")[2], *kept, b"Connection: close"]
    return status, b"\r\n".join(lines) + b"\r\n\r\n", length


def answer(status: int, text: str) -> bytes:
    """Return a whole response of the proxy's own, with ``text`` as its body."""
    reasons = {
        200: "Connection established", 400: "Bad Request", 403: "Forbidden", 411: "Length Required",
        431: "Request Header Fields Too Large", 502: "Bad Gateway", 503: "Service Unavailable",
        504: "Gateway Timeout", 505: "HTTP Version Not Supported",
    }  # fmt: skip
    body = f"smolbuild: {text}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status} {reasons.get(status, 'Error')}\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _split(
    head: bytes, error: Callable[[str], BadRequestError]
) -> tuple[bytes, tuple[_Header, ...]]:
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(lines) > _MAX_HEADERS:
        raise error("head with too many lines")
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise error("malformed header line")
        headers.append((name, value.strip(b" \t")))
    return lines[0], tuple(headers)


def _authority(text: str, default_port: int | None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text)
    host = normal_host(match[1]) if match else None
    port = int(match[2]) if match and match[2] else default_port
    if host is None or port is None or not 1 <= port <= 65535:
        raise BadRequestError(400, "the target is no host and port")
    return host, port


def _origin(headers: tuple[_Header, ...], origin: str) -> tuple[str, int, str]:
    """Return host and port of a request that was sent to ``origin``, and what ``Host`` must say.

    What was connected to decides nothing when the request names another host: that one is asked
    for then. But a server known by its address alone answers for all the names it likes.
    """
    values = [value for name, value in headers if name.lower() == b"host"]
    if len(values) > 1:
        raise BadRequestError(400, "more than one Host")
    said = values[0].decode("latin-1") if values else ""
    host = _authority(said, 80)[0] if said else origin
    if origin.replace(".", "").isdecimal():
        return origin, 80, said
    return host, 80, ""


def _end_to_end(headers: tuple[_Header, ...]) -> tuple[_Header, ...]:
    named = {
        option.strip().lower()
        for name, value in headers
        if name.lower() in {b"connection", b"proxy-connection"}
        for option in value.split(b",")
    }
    dropped = _HOP_BY_HOP | (named - {b"content-length"})
    return tuple((name, value) for name, value in headers if name.lower() not in dropped)


def _body_length(headers: tuple[_Header, ...]) -> int:
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        if lengths:
            raise BadRequestError(400, "Content-Length and Transfer-Encoding together")
        raise BadRequestError(411, "send the body with a Content-Length")
    if len(lengths) > 1:
        raise BadRequestError(400, "more than one Content-Length")
    return _number(set(lengths), lambda text: BadRequestError(400, text)) if lengths else 0


def _number(values: set[bytes], error: Callable[[str], BadRequestError]) -> int:
    (value, *more) = values
    if more or not re.fullmatch(rb"[0-9]{1,15}", value) or int(value) > _MAX_BODY:
        raise error("malformed Content-Length")
    return int(value)
