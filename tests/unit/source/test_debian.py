"""What surrounds mmdebstrap: sources, locks, the archive of locked packages, normalisation."""

import contextlib
import io
import lzma
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_trees import entry, listing, make_tar

from smolbuild.core.errors import BuildError, HostError, UsageError
from smolbuild.core.events import silent
from smolbuild.core.process import Completed
from smolbuild.model.lock import LockedDebian, LockedPackage
from smolbuild.model.smolfile import Base
from smolbuild.source import apt_sources, debian
from smolbuild.source.apt_sources import AptSource, host_sources, sources_for
from smolbuild.source.deb import read_deb
from smolbuild.source.deb_archive import CachedDeb, serve_archive
from smolbuild.source.debian import resolve_debian
from smolbuild.source.debian_clean import clean_root
from smolbuild.source.debian_identity import debian_digest
from smolbuild.source.tree import Kind, Node, Tree

CONTROL = "Package: hello\nVersion: 1:2-3\nArchitecture: amd64\nPriority: optional\n"


def make_deb(path: Path, control: str = CONTROL, epoch: int = 1_700_000_000) -> Path:
    tar = make_tar([entry("./md5sums", b"x"), entry("./control", control.encode())])
    members = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", lzma.compress(tar)),
        ("data.tar.xz", lzma.compress(make_tar([]))),
    ]
    out = io.BytesIO(b"!<arch>\n")
    out.seek(0, os.SEEK_END)
    for name, data in members:
        out.write(f"{name:<16}{epoch:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode())
        out.write(data + b"\n" * (len(data) % 2))
    path.write_bytes(out.getvalue())
    return path


def test_a_package_says_what_it_is(tmp_path):
    deb = read_deb(make_deb(tmp_path / "a.deb"))
    assert deb.control == CONTROL.rstrip("\n")
    assert deb.fields["Version"] == "1:2-3"
    assert deb.epoch == 1_700_000_000


@given(st.data())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_packages_are_build_errors(tmp_path, data):
    path = make_deb(tmp_path / "a.deb")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(BuildError):  # or it is still whole where it matters
        read_deb(path)


def _lock(*names: str, **facts) -> LockedDebian:
    packages = tuple(
        LockedPackage(name=name, version="1", architecture="amd64", sha256=f"{i:064x}")
        for i, name in enumerate(names)
    )
    return LockedDebian(
        **({"suite": "bookworm", "variant": "minbase", "architecture": "amd64"} | facts),
        packages=packages,
    )


def test_the_archive_serves_the_locked_packages_and_nothing_else(tmp_path):
    path = make_deb(tmp_path / "a.deb")
    cached = CachedDeb(path=path, sha256="a" * 64, deb=read_deb(path))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with serve_archive(_lock("hello"), [cached]) as uri:

        def get(name: str) -> bytes:
            with opener.open(f"{uri}/{name}", timeout=10) as answer:
                return answer.read()

        index = get("dists/bookworm/main/binary-amd64/Packages").decode()
        assert index.startswith(CONTROL)
        assert f"Size: {path.stat().st_size}\nSHA256: {'a' * 64}\n" in index
        assert f" {len(index)} main/binary-amd64/Packages" in get("dists/bookworm/Release").decode()
        assert get(f"pool/{'a' * 64}.deb") == path.read_bytes()
        for wrong in ("", "../a.deb", "pool/b.deb", "dists/bookworm/InRelease"):
            with pytest.raises(urllib.error.HTTPError, match="404") as caught:
                get(wrong)
            caught.value.close()
        outside = uri.rpartition("/")[0]
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            opener.open(f"{outside}/dists/bookworm/Release", timeout=10)
        caught.value.close()
    with pytest.raises(urllib.error.URLError):
        opener.open(f"{uri}/dists/bookworm/Release", timeout=10)


def test_the_digest_depends_on_the_lock_and_not_on_its_order():
    base = Base(debian="bookworm", packages=("a",))
    lock = _lock("a", "b")
    one = debian_digest(base, lock)
    turned = LockedDebian(
        suite="bookworm", variant="minbase", architecture="amd64", packages=lock.packages[::-1]
    )
    assert debian_digest(base, turned) == one
    others = [
        debian_digest(base, _lock("a", "c")),
        debian_digest(base, _lock("a")),
        debian_digest(base, _lock("a", "b", suite="trixie")),
        debian_digest(base, _lock("a", "b", variant="apt")),
        debian_digest(base, _lock("a", "b", components=("main", "contrib"))),
        debian_digest(base, _lock("a", "b", requested=("b",))),
        debian_digest(Base(debian="bookworm", mirror="http://mirror.example.com/debian"), lock),
    ]
    assert len({one, *others}) == len(others) + 1


def test_an_unknown_variant_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="variant 'tiny'") as caught:
        resolve_debian(Base(debian="bookworm", variant="tiny"), cache=tmp_path, emit=silent)
    assert "minbase" in caught.value.hint


_TARGETS = """\
http://mirror.example.com/debian/|bookworm|Debian|{sources}:1
http://mirror.example.com/debian/|bookworm-updates|Debian|{sources}:1
http://mirror.example.com/debian/|bookworm-backports|Debian|{sources}:1
http://security.example.com/debian-security/|bookworm-security|Debian|{sources}:2
http://packages.example.com/tool/|bookworm|Tool|{list}:1
http://other.example.com/debian/|bookworm|$(ORIGIN)|{list}:2
"""


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Give apt's answers: a host with Debian sources in both formats."""
    sources, lines = tmp_path / "debian.sources", tmp_path / "other.list"
    sources.write_text(
        "Types: deb\nURIs: x\nSigned-By: /keys/debian.gpg\n\n# note\nTypes: deb\nTrusted: yes\n"
    )
    lines.write_text("deb http://x\ndeb [arch=amd64 signed-by=/keys/other.gpg] http://y\n")
    monkeypatch.setattr(apt_sources, "DEBIAN_KEYRING", tmp_path / "no-keyring")
    answer = {"stdout": _TARGETS.format(sources=sources, list=lines)}

    def run(argv, **_):
        assert argv[0] in ("apt-get", "mmdebstrap")
        if argv[0] == "mmdebstrap":
            return Completed(
                status=1,
                stdout=b"",
                stderr=b"deb [signed-by=/k] http://default.example.com/debian trixie main\nE: x\n",
            )
        return Completed(status=0, stdout=answer["stdout"].encode(), stderr=b"")

    monkeypatch.setattr(apt_sources, "run", run)
    return answer


def test_the_hosts_debian_sources_for_another_suite(apt):
    found = host_sources(Base(debian="trixie"))
    assert [source.line() for source in found] == [
        "deb [signed-by=/keys/debian.gpg] http://mirror.example.com/debian trixie main",
        "deb [signed-by=/keys/debian.gpg] http://mirror.example.com/debian trixie-updates main",
        "deb [trusted=yes] http://security.example.com/debian-security trixie-security main",
        "deb [signed-by=/keys/other.gpg] http://other.example.com/debian trixie main",
    ]


def test_a_rolling_suite_has_no_security_or_updates(apt):
    assert {source.suite for source in host_sources(Base(debian="sid"))} == {"sid"}


def test_a_host_of_another_distribution_gets_the_defaults(apt):
    apt["stdout"] = "http://archive.example.com/ubuntu/|noble|Ubuntu|/etc/x.list:1\n"
    (found,) = sources_for(Base(debian="trixie"))
    assert found.line() == "deb http://default.example.com/debian trixie main"


def test_a_named_mirror_is_used_alone(apt):
    (found,) = sources_for(Base(debian="trixie", mirror="http://own.example.com/debian/"))
    assert found.line() == "deb http://own.example.com/debian trixie main"


def test_credentials_and_keyrings_stay_out_of_the_image():
    source = AptSource(
        uri="https://user:secret@mirror.example.com:8080/debian?x=secret",
        suite="bookworm",
        components=("main",),
        options=("signed-by=/home/someone/key.gpg",),
    )
    assert source.public() == "deb https://mirror.example.com:8080/debian bookworm main"


def _root() -> Tree:
    tree = Tree()
    for path in (
        "etc/hostname", "etc/resolv.conf", "etc/machine-id", "etc/ssh/ssh_host_rsa_key",
        "etc/ssh/ssh_config", "etc/apt/sources.list", "etc/ssl/private/ssl-cert-snakeoil.key",
        "etc/postgresql-common/createcluster.d/smolbuild.conf", "var/log/dpkg.log",
        "var/log/apt/term.log", "var/log/lastlog", "var/lib/apt/lists/x", "var/cache/apt/y.bin",
        "var/lib/systemd/random-seed", "tmp/left", "dev/null", "usr/bin/tool",
    ):  # fmt: skip
        tree.put(path.encode(), b"content", mtime=2_000_000_000)
    tree.ensure_directory(b"etc/ssl/certs").children[b"0a1b2c3d.0"] = Node(
        kind=Kind.SYMLINK, target=b"ssl-cert-snakeoil.pem"
    )
    return tree


def _deb(tmp_path, name: str, extra: str = "") -> CachedDeb:
    control = f"Package: {name}\nVersion: 1\nArchitecture: all\n{extra}"
    path = make_deb(tmp_path / f"{name}.deb", control)
    return CachedDeb(path=path, sha256="0" * 64, deb=read_deb(path))


def test_what_belongs_to_one_machine_or_moment_is_taken_out(tmp_path):
    tree = _root()
    packages = [
        _deb(tmp_path, "wanted"),
        _deb(tmp_path, "along"),
        _deb(tmp_path, "base", "Essential: yes\n"),
    ]
    lock = _lock("wanted", "along", "base", requested=("wanted=1",))
    for _ in range(2):  # and again: idempotent
        clean_root(tree, lock, packages, sources=["deb x"], epoch=1_700_000_000)
    found = listing(tree)
    assert {path for path, what in found.items() if what != "directory"} == {
        "etc/machine-id",
        "etc/ssh/ssh_config",
        "etc/apt/sources.list",
        "usr/bin/tool",
        "var/lib/apt/extended_states",
        "var/log/lastlog",
    }
    assert found["etc/machine-id"] == found["var/log/lastlog"] == b""
    assert found["etc/apt/sources.list"] == b"deb x\n"
    assert found["var/lib/apt/extended_states"] == (
        b"Package: along\nArchitecture: amd64\nAuto-Installed: 1\n\n"
    )
    assert all(node.mtime <= 1_700_000_000 for _, node in tree.walk())


def test_without_root_and_without_namespaces_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(debian.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(debian, "find_program", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(
        debian, "run", lambda *_, **__: Completed(status=1, stdout=b"", stderr=b"no subuid")
    )
    with pytest.raises(HostError, match="user namespaces") as caught:
        debian._mode()
    assert "uidmap" in caught.value.hint
    assert caught.value.details == "no subuid"


def test_a_package_set_that_differs_is_reported(tmp_path):
    tree = Tree()
    tree.put(
        b"var/lib/dpkg/status",
        b"Package: a\nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n"
        b"Description: x\n Package: fake\n\n"
        b"Package: c\nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n\n"
        b"Package: b\nStatus: install ok unpacked\nVersion: 1\nArchitecture: amd64\n",
    )
    with pytest.raises(BuildError, match="not those of the lock") as caught:
        debian._check_installed(tree, _lock("a", "b"))
    assert caught.value.details == "- b 1 amd64\n+ c 1 amd64"
    tree.put(
        b"var/lib/dpkg/status",
        b"Package: a\nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n",
    )
    debian._check_installed(tree, _lock("a"))


def test_packages_that_left_the_archive_are_named(tmp_path, monkeypatch):
    class Apt:
        def __init__(self, *_): ...
        def update(self): ...
        def available(self, packages):
            return {packages[0].sha256}

    monkeypatch.setattr(debian, "PrivateApt", Apt)
    monkeypatch.setattr(debian, "sources_for", lambda _: ())
    with pytest.raises(BuildError, match="no longer in the archive") as caught:
        debian._fetch(Base(debian="bookworm"), _lock("here", "gone"), tmp_path, silent)
    assert caught.value.details == "gone 1"
    assert "lock --update" in caught.value.hint


def test_tarfile_agrees_that_the_test_package_is_one(tmp_path):
    path = make_deb(tmp_path / "a.deb")
    data = path.read_bytes()
    start = data.index(b"control.tar.xz") + 60
    size = int(data[start - 12 : start - 2])
    with tarfile.open(fileobj=io.BytesIO(data[start : start + size]), mode="r:xz") as tar:
        assert "./control" in tar.getnames()


def test_a_snapshot_is_a_date_in_the_mirror_whose_lists_may_be_old():
    mirror = "https://snapshot.example.com/debian/{snapshot}"
    base = Base(debian="bookworm", mirror=mirror, snapshot="20261101T000000Z")
    (source,) = sources_for(base)
    assert source.uri == "https://snapshot.example.com/debian/20261101T000000Z"
    assert "check-valid-until=no" in source.line()
    assert source.public() == f"deb {source.uri} bookworm main"
    plain = Base(debian="bookworm", mirror="https://debian.example.com/debian")
    assert "check-valid-until" not in sources_for(plain)[0].line()


def test_another_snapshot_is_another_root_for_its_sources_differ():
    mirror = "https://snapshot.example.com/debian/{snapshot}"
    first, second = (
        debian_digest(Base(debian="bookworm", mirror=mirror, snapshot=date), _lock("dash"))
        for date in ("20261101T000000Z", "20261102T000000Z")
    )
    assert first != second
