"""Certificates that a guest trusts: what is read from the host, and where it goes in a guest."""

import base64
import subprocess
from pathlib import Path

import pytest

from smolbuild.build.authorities import authority_env, read_authorities
from smolbuild.build.trust_store import _SCRIPT, install_authorities
from smolbuild.core.errors import BuildError, SmolfileError
from smolbuild.machine.base import BootSpec, Disk, Shape
from smolbuild.machine.fake import FakeEngine
from smolbuild.model.parse import parse_text

DER = b"\x30\x82\x01\x00" + bytes(256)
OTHER = b"\x30\x81\x90" + bytes(144)


def pem(der: bytes = DER, label: str = "CERTIFICATE") -> bytes:
    return b"-----BEGIN %s-----\n%s-----END %s-----\n" % (
        label.encode(), base64.encodebytes(der), label.encode(),
    )  # fmt: skip


def smolfile(directory: Path, *names: str):
    listed = ", ".join(f'"{name}"' for name in names)
    text = f'image = "x"\n\n[network]\nca_files = [{listed}]\n'
    return parse_text(text, file=str(directory / "Smolfile"), environment={})


def test_each_certificate_counts_once_whatever_stands_around_it(tmp_path: Path) -> None:
    (tmp_path / "one.pem").write_bytes(b"# a comment\r\n" + pem() + pem(OTHER))
    trusted = pem(OTHER + b"aux", "TRUSTED CERTIFICATE")
    (tmp_path / "two.pem").write_bytes(trusted.replace(b"\n", b"\r\n"))
    both = read_authorities(smolfile(tmp_path, "one.pem"))
    assert len(both) == 2
    again = read_authorities(smolfile(tmp_path, str(tmp_path / "two.pem"), "one.pem"))
    assert again == both
    assert sorted(one.pem for one in both) == sorted(
        read_authorities(smolfile(tmp_path, "one.pem", "one.pem"))[n].pem for n in (0, 1)
    )
    assert all(one.pem.startswith(b"-----BEGIN CERTIFICATE-----\n") for one in both)
    assert len({one.name for one in both}) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no PEM certificate"),
        (DER, "holds no PEM certificate (convert it: openssl"),
        (pem() + pem(b"secret", "PRIVATE KEY"), "holds a private key"),
        (pem() + pem(b"secret", "RSA PRIVATE KEY"), "holds a private key"),
        (pem(DER[:-1]), "certificate 1 is cut short or none"),
        (pem(b"\x04\x82\x01\x00" + bytes(256)), "certificate 1 is cut short or none"),
        (pem() + pem().replace(b"MIIB", b"*IIB"), "certificate 2 is no base64"),
        (pem() + pem()[:-20], "is damaged: a block has no end"),
        (b"x" * ((1 << 20) + 1), "is larger than"),
        (None, "is not a file of this host"),
    ],
)
def test_bad_files_are_problems_with_their_line(tmp_path: Path, content, said) -> None:
    (tmp_path / "good.pem").write_bytes(pem())
    if content is not None:
        (tmp_path / "bad.pem").write_bytes(content)
    with pytest.raises(SmolfileError) as caught:
        read_authorities(smolfile(tmp_path, "good.pem", "bad.pem"))
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (4, "network.ca_files[1]")
    assert said in str(problem)
    assert "secret" not in str(problem)


def fake_program(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    stage = root / "run/smolbuild/authorities"
    stage.mkdir(parents=True)
    (stage / "smolbuild-1.crt").write_bytes(pem())
    return root


def install(root: Path, programs: Path) -> None:
    programs.mkdir(exist_ok=True)
    tools = ["cp", "mkdir", "cat", "ln", "rm"]
    for tool in tools:
        (programs / tool).symlink_to(f"/bin/{tool}")
    subprocess.run(
        ["/bin/sh", "-c", _SCRIPT, "sh", str(root)],
        env={"PATH": str(programs)},
        check=True,
        timeout=30,
    )
    assert not (root / "run/smolbuild/authorities").exists()
    assert (root / "etc/smolbuild/ca-files.pem").read_bytes() == pem()


def bundle(root: Path) -> bytes:
    target = str((root / "etc/smolbuild/ca-bundle.pem").readlink())
    assert target.startswith("/etc/")
    return (root / target[1:]).read_bytes()


def test_debian(guest: Path, tmp_path: Path) -> None:
    script = """mkdir -p "$1/etc/ssl/certs"
cat "$1"/usr/local/share/ca-certificates/*.crt > "$1/etc/ssl/certs/ca-certificates.crt"
echo updated"""
    fake_program(tmp_path / "bin", "update-ca-certificates", script)
    install(guest, tmp_path / "bin")
    assert bundle(guest) == pem()


def test_fedora(guest: Path, tmp_path: Path) -> None:
    (guest / "etc/pki/ca-trust/source/anchors").mkdir(parents=True)
    (guest / "etc/pki/tls/certs").mkdir(parents=True)
    script = """cat "$1"/etc/pki/ca-trust/source/anchors/*.crt > "$1/etc/pki/x.pem"
ln -s ../../x.pem "$1/etc/pki/tls/certs/ca-bundle.crt\""""
    fake_program(tmp_path / "bin", "update-ca-trust", script)
    install(guest, tmp_path / "bin")
    assert bundle(guest) == pem()


def test_a_bundle_without_a_program_for_it_as_alpine_has_it(guest: Path, tmp_path: Path) -> None:
    (guest / "etc/ssl/certs").mkdir(parents=True)
    (guest / "etc/ssl/certs/ca-certificates.crt").write_bytes(b"others\n")
    (guest / "etc/ssl/cert.pem").symlink_to("certs/ca-certificates.crt")
    install(guest, tmp_path / "bin")
    assert bundle(guest) == b"others\n" + pem()
    # Where ca-certificates is installed later, its own program finds them here.
    assert (guest / "usr/local/share/ca-certificates/smolbuild-1.crt").read_bytes() == pem()


def test_an_image_without_any_store(guest: Path, tmp_path: Path) -> None:
    install(guest, tmp_path / "bin")
    assert bundle(guest) == pem()


def test_a_guest_in_which_it_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(pem())
    found = read_authorities(smolfile(tmp_path, "ca.pem"))
    base = tmp_path / "base"
    base.write_bytes(bytes(1 << 20))
    spec = BootSpec(
        kernel=base, initrd=base, disk=Disk(base=base),
        shape=Shape(cpus=1, memory_mib=1, disk_bytes=1 << 20, network="none"),
    )  # fmt: skip
    engine = FakeEngine(tmp_path / "machines", on_exec=lambda _: (127, b"", b"no shell"))
    machine = engine.boot(spec)
    install_authorities(machine, ())
    assert machine.executed == []
    with pytest.raises(BuildError, match="status 127") as caught:
        install_authorities(machine, found)
    assert caught.value.details == "no shell"
    assert machine._guest.files[f"/run/smolbuild/authorities/{found[0].name}"][1] == found[0].pem


def test_programs_with_a_list_of_their_own_are_told(tmp_path: Path) -> None:
    assert authority_env(smolfile(tmp_path)) == ()
    names = [name for name, _ in authority_env(smolfile(tmp_path, "ca.pem"))]
    assert names == ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"]
