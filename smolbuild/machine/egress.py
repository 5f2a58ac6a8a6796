"""The host's side of the allow-list, for guests without a network device.

Each connection of a guest program arrives as one socket: those to 127.0.0.1:3128 as a request to an
HTTP proxy (``CONNECT`` or an absolute ``http://`` URL), all others with where they were going. One
request per connection is served, checked against the allow-list, and carried to the checked
address, or through the proxy that the host itself needs.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

from smolbuild.core.clock import Deadline
from smolbuild.machine.egress_account import Account
from smolbuild.machine.egress_http import (
    HEAD_LIMIT,
    BadRequestError,
    ProxyRequest,
    answer,
    parse_request,
    parse_response,
    tunnel_request,
)
from smolbuild.machine.egress_route import Resolve, Route, open_route, resolve_on_host
from smolbuild.machine.egress_rules import Rules, normal_host
from smolbuild.machine.relay import copy_bytes, read_head, relay
from smolbuild.machine.tunnel import Destination
from smolbuild.model.egress import EgressRecord

__all__ = ["Egress"]

_HEAD_SECONDS = 30.0
_CONNECT_SECONDS = 30.0
_IDLE_SECONDS = 300.0
_MAX_CONNECTIONS = 128
_SETTLE_SECONDS = 5.0
_HTTP, _DNS = 80, 53


class Egress:
    """The way out of one machine; denies everything until ``allow``. Safe from any thread.

    Args:
        environment: where the host's own proxy is named (``HTTPS_PROXY``, ``NO_PROXY`` …).
        resolve: gives the addresses of a name, by a deadline.

    """

    def __init__(
        self, *, environment: Mapping[str, str], resolve: Resolve = resolve_on_host
    ) -> None:
        self._environment = environment
        self._resolve = resolve
        self._lock = threading.Condition()
        self._rules = Rules()
        self._account = Account()
        self._open: set[socket.socket] = set()
        self._closed = False

    def allow(self, hosts: tuple[str, ...] | None, cidrs: tuple[str, ...] = ()) -> None:
        """Let these hosts and networks through from now on; None: nothing.

        Raises:
            ValueError: an entry is neither name, pattern, address nor network.

        """
        rules = Rules() if hosts is None else Rules.parse(hosts, cidrs)
        with self._lock:
            self._rules = rules

    def accept(self, connection: socket.socket, destination: Destination | None = None) -> bool:
        """Serve ``connection`` from a thread of its own; returns at once and owns the socket.

        Returns False for what is refused without asking anybody.

        Args:
            connection: with a program in the guest.
            destination: where it was going; None: it is for the proxy.

        """
        with self._lock:
            full = self._closed or len(self._open) >= _MAX_CONNECTIONS
            if not full:
                self._open.add(connection)
        if full or self._is_denied(destination):
            self._forget(connection)
            connection.close()
            return False
        threading.Thread(
            target=self._serve, args=(connection, destination), name="egress", daemon=True
        ).start()
        return True

    def _is_denied(self, destination: Destination | None) -> bool:
        """Note and tell what needs no thread; on port 80 the answer says more."""
        if destination is None or destination.port == _HTTP:
            return False
        host = normal_host(destination.host)
        with self._lock:
            rules = self._rules
        if host is not None and rules.may_ask(host):
            return False
        if host is not None:
            record = EgressRecord(host=host, port=destination.port, status=403, denied=True)
            self._account.add(record)
        return True

    def resolves(self, name: str) -> bool:
        """Return whether the guest may know an address for ``name``; nothing is resolved yet."""
        host = normal_host(name)
        with self._lock:
            rules = self._rules
        if host is not None and rules.may_ask(host):
            return True
        shown = host or name[:253].encode("unicode_escape").decode("ascii")
        self._account.add(EgressRecord(host=shown, port=_DNS, status=403, denied=True))
        return False

    def settle(self) -> None:
        """Abort what is open and wait until it is accounted for, at most 5 s."""
        self._abort()
        with self._lock:
            self._lock.wait_for(lambda: not self._open, timeout=_SETTLE_SECONDS)

    def take_records(self) -> tuple[EgressRecord, ...]:
        """Return the requests since the last call; what is open counts as it stands, once."""
        return self._account.take()

    def close(self) -> None:
        """Abort all connections and take no more. Idempotent."""
        with self._lock:
            self._closed = True
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, destination: Destination | None) -> None:
        try:
            with contextlib.suppress(OSError):  # either end went away: there is nobody to tell
                self._answer(connection, destination)
        finally:
            self._forget(connection)
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._lock.notify_all()

    def _answer(self, guest: socket.socket, destination: Destination | None) -> None:
        rest = b""
        try:
            if destination is not None and destination.port != _HTTP:
                request = _direct(destination)
            else:
                head, rest = read_head(guest, HEAD_LIMIT, Deadline.after(_HEAD_SECONDS))
                if not head:
                    return
                origin = None if destination is None else _direct(destination).host
                request = parse_request(head, origin=origin)
        except BadRequestError as error:
            _refuse(guest, error, destination)
            return
        record = EgressRecord(host=request.host, port=request.port, url=request.url, status=0)
        number = self._account.begin(record)
        try:
            with self._lock:
                rules = self._rules
            route = open_route(
                request,
                rules,
                environment=self._environment,
                resolve=self._resolve,
                deadline=Deadline.after(_CONNECT_SECONDS),
            )
            with self._closing(route.socket):
                if request.tunnel and destination is None:
                    guest.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                serve = self._tunnel if request.tunnel else self._forward
                record = serve(guest, rest, request, route, record)
        except BadRequestError as error:
            record = replace(record, status=error.status, denied=error.status == 403)
            _refuse(guest, error, destination)
        finally:
            self._account.end(number, record)

    def _tunnel(
        self,
        guest: socket.socket,
        rest: bytes,
        request: ProxyRequest,
        route: Route,
        record: EgressRecord,
    ) -> EgressRecord:
        del request
        sent, received = relay(guest, route.socket, first=rest, idle=_IDLE_SECONDS)
        return replace(record, status=200, sent=sent, received=received)

    def _forward(
        self,
        guest: socket.socket,
        rest: bytes,
        request: ProxyRequest,
        route: Route,
        record: EgressRecord,
    ) -> EgressRecord:
        server = route.socket
        try:
            server.settimeout(_IDLE_SECONDS)
            server.sendall(request.head(absolute_host=route.absolute_host, extra=route.headers))
            if request.expects_continue and not rest:
                guest.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            sent = copy_bytes(
                guest, server, first=rest, length=request.body_length, idle=_IDLE_SECONDS
            )
            status = 100
            while status < 200:  # an interim answer is of no use to the guest
                head, first = read_head(server, HEAD_LIMIT, Deadline.after(_IDLE_SECONDS))
                status, clean, length = parse_response(head, request.method)
        except OSError as error:
            raise BadRequestError(502, f"{request.host} broke the connection: {error}") from error
        guest.sendall(clean)
        received = copy_bytes(server, guest, first=first, length=length, idle=_IDLE_SECONDS)
        return replace(record, status=status, sent=sent, received=received)

    @contextlib.contextmanager
    def _closing(self, server: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(server)
        try:
            yield
        finally:
            self._forget(server)
            server.close()


def _direct(destination: Destination) -> ProxyRequest:
    host = normal_host(destination.host)
    if host is None or not 1 <= destination.port <= 65535:
        raise BadRequestError(400, "the target is no host and port")
    return tunnel_request(host, destination.port)


def _refuse(guest: socket.socket, error: BadRequestError, destination: Destination | None) -> None:
    guest.settimeout(_HEAD_SECONDS)
    if destination is None or destination.port == _HTTP:  # else nobody there speaks HTTP
        guest.sendall(answer(error.status, error.text))
    with contextlib.suppress(OSError):
        guest.shutdown(socket.SHUT_WR)
