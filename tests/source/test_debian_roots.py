"""Real Debian roots: apt resolves, mmdebstrap installs, twice the same bytes."""

import contextlib
from pathlib import Path

import pytest

from smolbuild.core.errors import BuildError
from smolbuild.core.events import silent
from smolbuild.model.lock import LockedDebian
from smolbuild.model.smolfile import Base
from smolbuild.source import debian
from smolbuild.source.debian import build_debian, resolve_debian
from smolbuild.source.ext4 import write_ext4
from smolbuild.source.tree import Kind

# ssl-cert makes a key of this machine when it is installed, python3-minimal compiles its modules.
BASE = Base(debian="bookworm", variant="essential", packages=("ssl-cert", "python3-minimal"))


@pytest.fixture(scope="module")
def cache(test_cache: Path) -> Path:
    return test_cache


@pytest.fixture(scope="module")
def lock(cache: Path) -> LockedDebian:
    return resolve_debian(BASE, cache=cache, emit=silent)


def test_the_lock_holds_the_whole_package_set(lock, cache):
    names = {package.name for package in lock.packages}
    assert {"dpkg", "libc6", "ssl-cert", "openssl", "python3-minimal", "bash"} <= names
    assert len(names) == len(lock.packages)
    assert resolve_debian(BASE, cache=cache, emit=silent) == lock


def test_a_package_that_does_not_exist(cache):
    base = Base(debian="bookworm", variant="essential", packages=("no-such-package-anywhere",))
    with pytest.raises(BuildError, match="cannot install") as caught:
        resolve_debian(base, cache=cache, emit=silent)
    assert "no-such-package-anywhere" in caught.value.details


def test_one_lock_gives_one_root_and_the_second_build_downloads_nothing(
    lock, cache, tmp_path, monkeypatch
):
    digests = []
    for number in range(2):
        with contextlib.ExitStack() as resources:
            tree = build_debian(
                BASE, lock, cache=cache, work=tmp_path, resources=resources, emit=silent
            )
            digests.append(write_ext4(tree, tmp_path / f"{number}.img", 1 << 30).digest)
            python = tree.find(b"usr/bin/python3.11")
            assert python is not None
            assert python.kind is Kind.FILE
            assert tree.find(b"etc/ssl/private").gid != 0, "group ssl-cert owns it"
            for gone in (b"etc/ssl/private/ssl-cert-snakeoil.key", b"etc/hostname", b"dev/null"):
                assert tree.find(gone) is None, gone
            lines = tree.find(b"etc/resolv.conf")
            assert lines is None, "the host's own"

        def no_network(*_args, **_kwargs):
            raise AssertionError("a second build went to the network")

        monkeypatch.setattr(debian, "PrivateApt", no_network)
    assert digests[0] == digests[1]
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".img")] == []
