"""A whole build with an allow-list: what its steps reach, what is recorded, what is kept."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SMOLFILE = """\
image = "./rootfs/"
cpus = 1
memory = 128
overlay = 1

[network]
allow_hosts = ["ok.example.com"]
ca_files = ["corp.pem"]

[smolbuild]
name = "test/network"

[[smolbuild.step]]
name = "fetch"
run = "unset http_proxy; wget -q -O /fetched 'http://ok.example.com/data?token=secret'"

[[smolbuild.step]]
name = "alone"
network = false
run = '''
unset http_proxy
if wget -q -O - http://ok.example.com/more; then exit 1; fi
cat /fetched /etc/smolbuild/ca-bundle.pem > /kept
'''

[[smolbuild.step]]
name = "late"
run = "echo 1"
"""


class _Proxy(http.server.BaseHTTPRequestHandler):
    """The proxy that the host needs; it answers for every site by itself."""

    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from outside\n")

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture(scope="module")
def outside() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        patch.delenv("no_proxy", raising=False)
        patch.delenv("NO_PROXY", raising=False)
        yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_steps_reach_what_is_allowed_and_every_request_is_kept(
    smolbuild, own_project: Path, outside, certificate: bytes
) -> None:
    project = ["-C", str(own_project)]
    (own_project / "Smolfile").write_text(SMOLFILE)
    (own_project / "corp.pem").write_bytes(certificate)
    binaries = own_project / "rootfs/bin"
    for applet in ("wget", "ln", "cp"):
        with contextlib.suppress(FileExistsError):
            (binaries / applet).symlink_to("busybox")

    done = smolbuild("build", *project, "-t", "network:1")
    assert done.status == 0, done.stderr
    assert outside.seen == ["http://ok.example.com/data?token=secret"]
    fetched = {
        "step": "fetch", "host": "ok.example.com", "port": 80, "status": 200, "sent": 0,
        "received": 13, "denied": False, "requests": 1, "url": "http://ok.example.com/data",
    }  # fmt: skip
    egress = recorded(smolbuild, "network:1")
    assert egress[0] == fetched
    assert {(e["step"], e["host"], e["port"], e["denied"]) for e in egress[1:]} == {
        ("alone", "ok.example.com", 53, True)
    }
    assert "token" not in str(egress)

    # The variables and the certificates are there in the fork as well; what ran is not run again.
    shown = smolbuild("run", "network:1", "--", "cat", "/kept", "/etc/smolbuild/ca-files.pem")
    assert shown.stdout == "from outside\n" + 2 * certificate.decode(), shown.stderr
    variables = smolbuild("run", "network:1", "--", "env").stdout
    assert "SSL_CERT_FILE=/etc/smolbuild/ca-bundle.pem\n" in variables
    (own_project / "Smolfile").write_text(SMOLFILE.replace("echo 1", "echo 2"))
    done = smolbuild("build", *project, "-t", "network:2")
    assert done.status == 0, done.stderr
    assert len(outside.seen) == 1
    assert recorded(smolbuild, "network:2") == egress

    # A step that fails says what to allow, though its tools only say that there is no such host.
    asks = "unset http_proxy; wget -q -O - http://other.example.org/"
    (own_project / "Smolfile").write_text(SMOLFILE.replace("echo 1", asks))
    done = smolbuild("build", *project)
    assert done.status == 1
    assert "other.example.org" in done.stderr
    assert "network.allow_hosts" in done.stderr
    assert len(outside.seen) == 1


def recorded(smolbuild, name: str) -> list[dict]:
    done = smolbuild("inspect", name, "--json")
    assert done.status == 0, done.stderr
    return done.document("inspect")["results"]["egress"]


def test_a_private_key_among_the_certificates_is_an_error_with_its_line(
    smolbuild, own_project: Path, certificate: bytes
) -> None:
    (own_project / "Smolfile").write_text(SMOLFILE)
    key = b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    (own_project / "corp.pem").write_bytes(certificate + key)
    done = smolbuild("plan", "-C", str(own_project))
    assert done.status == 2
    assert "Smolfile:8" in done.stderr
    assert "private key" in done.stderr


@pytest.fixture(scope="module")
def certificate() -> bytes:
    """Give what is read as a certificate: nobody looks further into it."""
    return (
        b"-----BEGIN CERTIFICATE-----\nMIGQ" + b"A" * 60 + b"\n" + b"A" * 64 + b"\n" + b"A" * 64
        + b"\n" + b"AAAA\n-----END CERTIFICATE-----\n"
    )  # fmt: skip
