"""The one entry: identity for the key, and a root disk that is made once and shared."""

import gzip
import os
import shutil
import threading
from pathlib import Path

import pytest
from source_trees import LayoutWriter, directory, entry, fsck, make_tar

from smolbuild.core.errors import BuildError, UsageError
from smolbuild.core.events import PhaseFinished, PhaseStarted, silent
from smolbuild.core.files import try_lock
from smolbuild.model.lock import Lock, LockedDebian, LockedImage
from smolbuild.model.smolfile import Base, Smolfile
from smolbuild.source import base_disk
from smolbuild.source.base_disk import prepare_base
from smolbuild.source.base_identity import base_identity
from smolbuild.source.base_lock import resolve_base
from smolbuild.source.disk import digest_disk

LAYER = make_tar([directory("bin"), entry("bin/sh", b"#!")])


class NoRegistry:
    """An ``ImageFetcher`` that must not be asked."""

    def resolve(self, reference):
        raise AssertionError(reference)

    manifest = blob = resolve


class NoEngine:
    """A ``DockerEngine`` that must not be asked."""

    def image(self, name):
        raise AssertionError(name)

    save = build = image


OUTSIDE = {"fetcher": NoRegistry(), "docker": NoEngine()}


@pytest.fixture
def project(tmp_path):
    directory = tmp_path / "project"
    directory.mkdir()
    layout = LayoutWriter(directory / "layout")
    layout.write([layout.manifest([gzip.compress(LAYER)], [LAYER])])
    return directory


def _smolfile(project: Path, image: str | None = "./layout", **facts) -> Smolfile:
    return Smolfile(path=project / "Smolfile", image=image, **({"overlay": 1} | facts))


def _lock(smolfile: Smolfile, cache: Path) -> Lock:
    locked = resolve_base(smolfile, cache=cache, **OUTSIDE, emit=silent)
    return Lock(image=locked.image, debian=locked.debian)


def _prepare(smolfile: Smolfile, cache: Path, emit=silent):
    lock = _lock(smolfile, cache)
    return prepare_base(smolfile, lock, cache=cache, **OUTSIDE, emit=emit)


def test_a_disk_is_made_once_and_described(project, tmp_path):
    cache, events = tmp_path / "cache", []
    disk = _prepare(_smolfile(project), cache, events.append)
    assert disk.path.stat().st_size == disk.disk_bytes == 1 << 30
    assert disk.path.stat().st_blocks * 512 < 32 << 20
    assert digest_disk(disk.path) == disk.digest
    assert [type(e) for e in events if isinstance(e, PhaseStarted | PhaseFinished)] == [
        PhaseStarted,
        PhaseFinished,
    ]
    before = disk.path.stat()
    events.clear()
    assert _prepare(_smolfile(project), cache, events.append) == disk
    assert disk.path.stat().st_ino == before.st_ino
    assert events == []
    smolfile = _smolfile(project)
    identity = base_identity(smolfile, _lock(smolfile, cache), cache=cache, **OUTSIDE)
    assert identity.digest == disk.image_digest


def test_what_the_guest_mounts_on_is_there(project, tmp_path):
    disk = _prepare(_smolfile(project), tmp_path / "cache")
    assert fsck(disk.path) == ""
    from source_trees import debugfs

    shown = debugfs(disk.path, "ls -p /")
    for name, mode in {"proc": "040555", "tmp": "041777", "dev": "040755", "run": "040755"}.items():
        assert f"/{mode}/0/0/{name}/" in shown


def test_two_caches_give_the_same_bytes(project, tmp_path):
    one = _prepare(_smolfile(project), tmp_path / "one")
    shutil.copytree(project, tmp_path / "elsewhere")
    two = _prepare(_smolfile(tmp_path / "elsewhere"), tmp_path / "two")
    assert one.digest == two.digest


def test_another_size_is_another_disk_of_the_same_image(project, tmp_path):
    small = _prepare(_smolfile(project), tmp_path)
    large = _prepare(_smolfile(project, overlay=2), tmp_path)
    assert small.image_digest == large.image_digest
    assert small.path != large.path
    assert large.path.stat().st_size == 2 << 30


def test_two_builds_at_once_share_one_disk(project, tmp_path, monkeypatch):
    made, real = [], base_disk.write_ext4

    def counting(*args):
        made.append(1)
        return real(*args)

    monkeypatch.setattr(base_disk, "write_ext4", counting)
    results, errors = [], []

    def build():
        try:
            results.append(_prepare(_smolfile(project), tmp_path / "cache"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(made) == 1
    assert len(set(map(str, results))) == 1


def test_a_failure_leaves_nothing_and_the_next_build_works(project, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def fails(_tree, path, _size):
        path.write_bytes(b"half a disk")
        raise BuildError("no")

    with monkeypatch.context() as patched:
        patched.setattr(base_disk, "write_ext4", fails)
        with pytest.raises(BuildError, match="no"):
            _prepare(_smolfile(project), cache)
    assert [p.name for p in (cache / "base").iterdir() if p.is_dir()] == []
    assert _prepare(_smolfile(project), cache).path.is_file()


def test_what_a_crash_left_is_not_taken_for_a_disk(project, tmp_path):
    cache = tmp_path / "cache"
    disk = _prepare(_smolfile(project), cache)
    name = disk.path.parent.name
    staging = disk.path.parent.with_name(f".tmp-{name}-x")
    disk.path.parent.rename(staging)
    (staging / "root.img").write_bytes(b"torn")
    abandoned, busy = cache / f"base/.tmp-{'a' * 64}-x", cache / f"base/.tmp-{'b' * 64}-x"
    abandoned.mkdir()
    busy.mkdir()
    with try_lock(cache / f"base/.{'b' * 64}.lock"):
        again = _prepare(_smolfile(project), cache)
    assert again == disk
    assert digest_disk(again.path) == again.digest
    assert not staging.exists()
    assert not abandoned.exists()
    assert busy.exists(), "another build is making that one"


def test_an_image_that_changes_is_another_base(project, tmp_path):
    smolfile = _smolfile(project)
    lock = _lock(smolfile, tmp_path)
    other = make_tar([entry("other", b"x")])
    layout = LayoutWriter(project / "other")
    layout.write([layout.manifest([gzip.compress(other)], [other])])
    shutil.rmtree(project / "layout")
    (project / "other").rename(project / "layout")
    found = base_identity(smolfile, lock, cache=tmp_path, **OUTSIDE)
    assert found.digest != lock.image.platform_digest


def test_an_unpacked_root(project, tmp_path):
    root = project / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/sh").write_bytes(b"x")
    smolfile = _smolfile(project, "./root")
    one = _prepare(smolfile, tmp_path / "cache")
    os.utime(root / "bin/sh", (5, 5))
    assert _prepare(smolfile, tmp_path / "cache").image_digest == one.image_digest
    (root / "bin/sh").write_bytes(b"y")
    assert _prepare(smolfile, tmp_path / "cache").image_digest != one.image_digest


def test_no_base_and_no_lock(project, tmp_path):
    arguments = {"cache": tmp_path, **OUTSIDE}
    with pytest.raises(UsageError, match="no base to build on"):
        base_identity(_smolfile(project, None), Lock(), **arguments)
    with pytest.raises(UsageError, match="lock does not have"):
        base_identity(_smolfile(project, "registry.example.com/x"), Lock(), **arguments)
    with pytest.raises(UsageError, match="lock does not have"):
        base_identity(_smolfile(project, None, base=Base(debian="bookworm")), Lock(), **arguments)


@pytest.mark.parametrize(
    "damage",
    [
        lambda disk: (disk.parent / "base.json").write_text("{"),
        lambda disk: (disk.parent / "base.json").write_text("{}"),
        lambda disk: disk.unlink(),
        lambda disk: os.truncate(disk, 4096),
    ],
    ids=["no-json", "no-record", "no-disk", "short-disk"],
)
def test_a_damaged_base_is_made_anew(project, tmp_path, damage):
    disk = _prepare(_smolfile(project), tmp_path)
    damage(disk.path)
    assert _prepare(_smolfile(project), tmp_path) == disk
    assert digest_disk(disk.path) == disk.digest


def test_a_debian_base_is_known_from_its_lock_alone(project, tmp_path):
    smolfile = _smolfile(project, None, base=Base(debian="bookworm", packages=("hello",)))
    debian = LockedDebian(
        suite="bookworm", variant="minbase", architecture="amd64", packages=(), requested=("hello",)
    )
    one = base_identity(smolfile, Lock(debian=debian), cache=tmp_path, **OUTSIDE)
    two = base_identity(smolfile, Lock(debian=debian), cache=tmp_path / "x", **OUTSIDE)
    assert one == two
    image = LockedImage(
        reference="x", digest="sha256:" + "0" * 64, platform_digest="sha256:" + "0" * 64
    )
    with pytest.raises(UsageError, match="lock does not have"):
        base_identity(smolfile, Lock(image=image), cache=tmp_path, **OUTSIDE)
