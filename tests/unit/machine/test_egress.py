import contextlib
import http.server
import ipaddress
import socket
import threading

import pytest

from smolbuild.machine.egress import Egress
from smolbuild.machine.tunnel import Destination


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        self._say(b"got " + self.path.encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, body))
        self._say(b"took " + body)

    def _say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "keep-alive")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def echo():
    """Give the port of a server that sends back what it gets, until the end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def resolve(host, *, deadline):
    del deadline
    table = {"good.example": "127.0.0.1", "rebound.example": "127.0.0.1"}
    if host not in table:
        raise OSError("unknown name")
    return (ipaddress.ip_address(table[host]),)


@pytest.fixture
def egress():
    made = Egress(environment={}, resolve=resolve)
    made.allow(("good.example",), ("127.0.0.1/32",))
    yield made
    made.close()


def ask(egress, data, *, end=True, to=None):
    """Send ``data`` as the guest would; return all that comes back."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        egress.accept(theirs, to)
        with contextlib.suppress(BrokenPipeError):  # denied before a word was said
            ours.sendall(data)
            if end:
                ours.shutdown(socket.SHUT_WR)
        got = bytearray()
        while part := ours.recv(65536):
            got += part
    return bytes(got)


def settled(egress, count):
    egress.settle()
    records = egress.take_records()
    assert len(records) == count
    return records


def test_plain_request(egress, web):
    line = b"GET http://good.example:%d/x?y HTTP/1.1\r\nHost: z\r\n\r\n" % web.server_port
    got = ask(egress, line, end=False)
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.endswith(b"\r\n\r\ngot /x?y")
    ((path, headers),) = web.seen
    assert path == "/x?y"
    assert headers["Host"] == f"good.example:{web.server_port}"
    (record,) = settled(egress, 1)
    assert record.target == record.url == f"http://good.example:{web.server_port}/x"
    assert (record.host, record.port) == ("good.example", web.server_port)
    assert egress.take_records() == ()
    assert (record.status, record.received, record.denied) == (200, len("got /x?y"), False)


def test_a_body_goes_along_and_a_second_request_does_not(egress, web):
    first = b"POST http://good.example:%d/p HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"
    second = b"GET http://good.example/smuggled HTTP/1.1\r\n\r\n"
    got = ask(egress, first % web.server_port + second)
    assert got.endswith(b"took body")
    assert web.seen == [("/p", b"body")]
    assert settled(egress, 1)[0].sent == 4


def test_a_body_is_asked_for(egress, web):
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        egress.accept(theirs)
        ours.sendall(
            b"POST http://good.example:%d/p HTTP/1.1\r\nContent-Length: 2\r\n"
            b"Expect: 100-continue\r\n\r\n" % web.server_port
        )
        assert ours.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        ours.sendall(b"ok")
        got = bytearray()
        while part := ours.recv(1000):
            got += part
    assert got.endswith(b"took ok")


def test_tunnel_carries_both_ways_and_ends(egress, echo):
    payload = bytes(range(256)) * 8192
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        egress.accept(theirs)
        ours.sendall(b"CONNECT good.example:%d HTTP/1.1\r\n\r\n" % echo)
        established = b"HTTP/1.1 200 Connection established\r\n\r\n"
        assert ours.recv(len(established)) == established
        writer = threading.Thread(
            target=lambda: (ours.sendall(payload), ours.shutdown(socket.SHUT_WR))
        )
        writer.start()
        got = bytearray()
        while part := ours.recv(65536):
            got += part
        writer.join()
    assert bytes(got) == payload
    (record,) = settled(egress, 1)
    assert record.target == f"good.example:{echo}"
    assert (record.sent, record.received) == (len(payload), len(payload))


@pytest.mark.parametrize(
    ("line", "target"),
    [
        (b"GET http://bad.example/a HTTP/1.1", "http://bad.example/a"),
        (b"CONNECT bad.example:443 HTTP/1.1", "bad.example:443"),
        (b"CONNECT 192.0.2.9:22 HTTP/1.1", "192.0.2.9:22"),
    ],
)
def test_what_is_not_on_the_list_is_denied_with_the_key_to_change(egress, line, target):
    got = ask(egress, line + b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"network.allow_hosts" in got
    (record,) = settled(egress, 1)
    assert (record.target, record.denied, record.status) == (target, True, 403)


def test_a_name_that_turns_to_the_host_is_denied(web):
    egress = Egress(environment={}, resolve=resolve)
    egress.allow(("rebound.example",))
    got = ask(egress, b"GET http://rebound.example:%d/ HTTP/1.1\r\n\r\n" % web.server_port)
    assert got.startswith(b"HTTP/1.1 403 ")
    assert b"network.allow_cidrs" in got
    assert web.seen == []
    egress.close()


def test_nothing_is_allowed_before_and_after(egress, web):
    line = b"GET http://good.example:%d/ HTTP/1.1\r\n\r\n" % web.server_port
    fresh = Egress(environment={}, resolve=resolve)
    assert ask(fresh, line).startswith(b"HTTP/1.1 403 ")
    fresh.close()
    assert ask(egress, line).startswith(b"HTTP/1.1 200 ")
    egress.allow(None)
    assert ask(egress, line).startswith(b"HTTP/1.1 403 ")


def test_unknown_names_and_closed_ports_are_bad_gateways(egress):
    egress.allow(("good.example", "unknown.example"), ("127.0.0.1/32",))
    assert b"502 Bad Gateway" in ask(egress, b"GET http://unknown.example/ HTTP/1.1\r\n\r\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert b"502 Bad Gateway" in ask(egress, b"CONNECT good.example:%d HTTP/1.1\r\n\r\n" % port)


def test_malformed_heads_are_answered(egress):
    assert b"400 Bad Request" in ask(egress, b"GET / HTTP/1.1\r\n\r\n")
    assert b"431 " in ask(egress, b"GET http://good.example/" + b"a" * 70_000)
    assert ask(egress, b"") == b""


def test_the_hosts_own_proxy_is_used(web):
    address = f"http://us%65r:pw@127.0.0.1:{web.server_port}"
    egress = Egress(
        environment={"HTTP_PROXY": address, "NO_PROXY": "direct.example"}, resolve=resolve
    )
    egress.allow(("far.example", "direct.example"))
    got = ask(egress, b"GET http://far.example/x HTTP/1.1\r\n\r\n", end=False)
    assert got.startswith(b"HTTP/1.1 200 ")
    ((path, headers),) = web.seen
    assert path == "http://far.example/x"
    assert headers["Proxy-Authorization"] == "Basic dXNlcjpwdw=="
    assert b"502 " in ask(egress, b"GET http://direct.example/x HTTP/1.1\r\n\r\n")
    egress.close()


def test_a_tunnel_through_the_hosts_own_proxy(echo):
    listener = socket.create_server(("127.0.0.1", 0))
    heads = []

    def serve():
        connection, _ = listener.accept()
        with connection:
            heads.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            connection.sendall(connection.recv(4096).upper())

    thread = threading.Thread(target=serve)
    thread.start()
    port = listener.getsockname()[1]
    egress = Egress(environment={"https_proxy": f"http://127.0.0.1:{port}"}, resolve=resolve)
    egress.allow(("far.example",))
    ours, theirs = socket.socketpair()
    with ours, listener:
        ours.settimeout(10)
        egress.accept(theirs)
        ours.sendall(b"CONNECT far.example:443 HTTP/1.1\r\n\r\n")
        assert ours.recv(1000).startswith(b"HTTP/1.1 200 ")
        ours.sendall(b"hello")
        assert ours.recv(100) == b"HELLO"
        thread.join()
    assert heads == [b"CONNECT far.example:443 HTTP/1.1\r\nHost: far.example:443\r\n\r\n"]
    egress.close()


def test_an_open_tunnel_is_cut_and_accounted_for_when_it_settles(egress, echo):
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        egress.accept(theirs)
        ours.sendall(b"CONNECT good.example:%d HTTP/1.1\r\n\r\nhello" % echo)
        while not ours.recv(1000).endswith(b"hello"):
            pass
        (record,) = settled(egress, 1)
        assert (record.status, record.sent, record.received) == (200, 5, 5)
        assert ours.recv(10) == b""


def test_close_ends_what_is_open_and_refuses_more(egress, echo):
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        egress.accept(theirs)
        ours.sendall(b"CONNECT good.example:%d HTTP/1.1\r\n\r\n" % echo)
        ours.recv(1000)
        egress.close()
        assert ours.recv(10) == b""
    ours, theirs = socket.socketpair()
    with ours:
        egress.accept(theirs)
        assert ours.recv(10) == b""


def test_a_connection_past_the_proxy_is_carried_as_it_is(egress, echo):
    assert ask(egress, b"\0any bytes", to=Destination("GOOD.example", echo)) == b"\0any bytes"
    assert ask(egress, b"x", to=Destination("bad.example", echo)) == b""
    assert ask(egress, b"x", to=Destination("not\na host", echo)) == b""
    good, bad = settled(egress, 2)
    assert (good.target, good.status, good.sent) == (f"good.example:{echo}", 200, 10)
    assert (bad.target, bad.denied) == (f"bad.example:{echo}", True)


@pytest.mark.parametrize(
    ("to", "said", "url", "host", "status"),
    [
        ("good.example", b"good.example", "http://good.example/x", b"good.example", b"200"),
        ("good.example", None, "http://good.example/x", b"good.example", b"200"),
        # Whom the request means decides, not where the connection went.
        ("good.example", b"bad.example", "http://bad.example/x", None, b"403"),
        ("good.example", b"localhost", "http://localhost/x", None, b"403"),
        ("good.example", b"a b", None, None, b"400"),
        # A server that is allowed by its address has what names it likes.
        ("127.0.0.1", b"name.example:80", "http://127.0.0.1/x", b"name.example:80", b"200"),
        ("192.0.2.1", b"good.example", "http://192.0.2.1/x", None, b"403"),
    ],
)
def test_plain_http_past_the_proxy(web, to, said, url, host, status):
    proxy = {"http_proxy": f"http://127.0.0.1:{web.server_port}"}
    egress = Egress(environment=proxy, resolve=resolve)
    egress.allow(("good.example",), ("127.0.0.1/32",))
    head = b"GET /x?secret HTTP/1.1\r\n" + (b"Host: %s\r\n" % said if said else b"")
    got = ask(egress, head + b"\r\n", end=False, to=Destination(to, 80))
    assert got.startswith(b"HTTP/1.1 " + status)
    assert [record.url for record in settled(egress, 1 if url else 0)] == ([url] if url else [])
    assert [headers["Host"] for _, headers in web.seen] == ([host.decode()] if host else [])
    egress.close()


def test_names_that_are_not_on_the_list_are_not_even_looked_up():
    asked = []

    def note(host, *, deadline):
        del deadline
        asked.append(host)
        raise OSError("unknown name")

    egress = Egress(environment={}, resolve=note)
    egress.allow(("good.example",), ("192.0.2.0/24",))
    assert egress.resolves("good.example")
    assert not egress.resolves("secret.evil.example")
    assert not egress.resolves("127.0.0.1")
    assert not egress.resolves("\x1b[31m")
    assert ask(egress, b"CONNECT secret.evil.example:53 HTTP/1.1\r\n\r\n").startswith(
        b"HTTP/1.1 403"
    )
    assert asked == []
    egress.settle()
    assert [(r.host, r.port, r.requests) for r in egress.take_records()] == [
        ("secret.evil.example", 53, 2),
        ("127.0.0.1", 53, 1),
        ("\\x1b[31m", 53, 1),
    ]
    egress.allow((), ("0.0.0.0/0",))
    assert egress.resolves("any.example")
    egress.allow(None)
    assert not egress.resolves("good.example")
    egress.close()
