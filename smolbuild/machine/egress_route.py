"""From a guest's request to a connected socket: allow-list, addresses, the host's own proxy."""

import base64
import ipaddress
import queue
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from smolbuild.core.clock import Deadline
from smolbuild.machine.egress_http import BadRequestError, ProxyRequest
from smolbuild.machine.egress_rules import Address, Rules
from smolbuild.machine.relay import read_head

__all__ = ["Resolve", "Route", "open_route", "resolve_on_host"]

_HEAD_LIMIT = 65536
_Headers = tuple[tuple[bytes, bytes], ...]


class Resolve(Protocol):
    """Gives the addresses of a name."""

    def __call__(self, host: str, *, deadline: Deadline) -> tuple[Address, ...]:
        """Return the addresses of ``host``; raise OSError if there are none by ``deadline``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A connected socket, and how the request must be written on it."""

    socket: socket.socket
    absolute_host: str = ""
    """Not empty: the next hop is a proxy, and wants this host in an absolute URL."""
    headers: _Headers = ()
    """For the next hop only."""


def open_route(
    request: ProxyRequest,
    rules: Rules,
    *,
    environment: Mapping[str, str],
    resolve: Resolve,
    deadline: Deadline,
) -> Route:
    """Check ``request`` against ``rules`` and connect; a tunnel through a further proxy is open.

    Raises:
        BadRequestError: 403 denied, 502 or 504 not reachable.

    """
    if not rules.may_ask(request.host):
        raise _denied(request)
    proxy = _proxy_for(request, environment)
    if proxy is not None:
        hop = (
            request.host
            if rules.allow_name(request.host)
            else str(_addresses(request, rules, resolve, deadline)[0])
        )
        return _through(proxy, request, hop, deadline)
    return Route(socket=_connect(request, _addresses(request, rules, resolve, deadline), deadline))


def resolve_on_host(host: str, *, deadline: Deadline) -> tuple[Address, ...]:
    """Return what the host's resolver says, IPv4 and IPv6, in its order.

    Raises:
        OSError: the name is unknown, or the resolver did not answer by ``deadline``.

    """
    answers: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.put(OSError(str(error)))
        else:
            answers.put([str(entry[4][0]) for entry in found])

    # getaddrinfo knows no deadline; its thread ends when the resolver gives up.
    threading.Thread(target=ask, name="resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError(f"{host} was not resolved in time") from None
    if isinstance(answer, OSError):
        raise answer
    return tuple(dict.fromkeys(ipaddress.ip_address(text.partition("%")[0]) for text in answer))


def _addresses(
    request: ProxyRequest, rules: Rules, resolve: Resolve, deadline: Deadline
) -> tuple[Address, ...]:
    try:
        found: tuple[Address, ...] = (ipaddress.ip_address(request.host),)
    except ValueError:
        try:
            found = resolve(request.host, deadline=deadline)
        except OSError as error:
            if not rules.allow_name(request.host):
                raise _denied(request) from error
            raise BadRequestError(502, f"{request.host} does not resolve: {error}") from error
    own = frozenset(address for address in found if _is_own(address))
    chosen = rules.choose(request.host, found, own=own)
    if chosen:
        return chosen
    if rules.allow_name(request.host):
        raise BadRequestError(
            403,
            f"{request.host} is allowed, but its address {', '.join(map(str, found))} is the "
            "host's own or link-local; name the address in network.allow_cidrs if it is meant",
        )
    raise _denied(request)


def _is_own(address: Address) -> bool:
    """Return whether the address belongs to this host: only its own can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _connect(
    request: ProxyRequest, addresses: tuple[Address, ...], deadline: Deadline
) -> socket.socket:
    problem: OSError | None = None
    for address in addresses:
        if deadline.passed():
            break
        try:
            return socket.create_connection(
                (str(address), request.port), timeout=deadline.left() + 0.001
            )
        except OSError as error:
            problem = error
    status = 504 if problem is None or isinstance(problem, TimeoutError) else 502
    raise BadRequestError(status, f"cannot connect to {request.host}:{request.port}: {problem}")


def _denied(request: ProxyRequest) -> BadRequestError:
    return BadRequestError(
        403,
        f"{request.host}:{request.port} is not on the allow-list; "
        f'add "{request.host}" to network.allow_hosts in the Smolfile if it is meant',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proxy:
    host: str
    port: int
    headers: _Headers


def _proxy_for(request: ProxyRequest, environment: Mapping[str, str]) -> _Proxy | None:
    if _bypassed(request.host, environment.get("no_proxy") or environment.get("NO_PROXY") or ""):
        return None
    kind = "https_proxy" if request.tunnel else "http_proxy"
    url = environment.get(kind) or environment.get(kind.upper())
    if not url:
        return None
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise BadRequestError(502, f"the host's {kind} is no http:// proxy")
    headers: _Headers = ()
    if parts.username is not None:
        user, password = (urllib.parse.unquote(p or "") for p in (parts.username, parts.password))
        token = base64.b64encode(f"{user}:{password}".encode())
        headers = ((b"Proxy-Authorization", b"Basic " + token),)
    return _Proxy(host=parts.hostname, port=port, headers=headers)


def _bypassed(host: str, listed: str) -> bool:
    for entry in (part.strip().lower().removeprefix("*").lstrip(".") for part in listed.split(",")):
        if entry and (host == entry or host.endswith(f".{entry}")):
            return True
    return any(part.strip() == "*" for part in listed.split(","))


def _through(proxy: _Proxy, request: ProxyRequest, hop: str, deadline: Deadline) -> Route:
    try:
        server = socket.create_connection((proxy.host, proxy.port), timeout=deadline.left() + 0.001)
    except OSError as error:
        raise BadRequestError(502, f"the host's proxy is not reachable: {error}") from error
    if not request.tunnel:
        return Route(socket=server, absolute_host=hop, headers=proxy.headers)
    try:
        _open_tunnel(server, request.authority(host=hop), proxy, deadline)
    except OSError as error:
        server.close()
        raise BadRequestError(502, f"the host's proxy broke the connection: {error}") from error
    except BadRequestError:
        server.close()
        raise
    return Route(socket=server)


def _open_tunnel(server: socket.socket, target: str, proxy: _Proxy, deadline: Deadline) -> None:
    lines = [
        f"CONNECT {target} HTTP/1.1".encode("ascii"),
        f"Host: {target}".encode("ascii"),
        *(name + b": " + value for name, value in proxy.headers),
    ]
    server.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
    head, rest = read_head(server, _HEAD_LIMIT, deadline)
    if head[:12] not in {b"HTTP/1.1 200", b"HTTP/1.0 200"} or rest:
        said = head[:80].splitlines()[0].decode("ascii", "replace") if head else "nothing"
        raise BadRequestError(502, f"the host's proxy answered {said!r}")
