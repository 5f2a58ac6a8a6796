"""Images in layouts, archives, registries and directories, and the choice between them."""

import gzip
import io
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import zstandard
from source_trees import (
    LayoutWriter,
    directory,
    entry,
    hardlink,
    image_config,
    listing,
    make_tar,
    sha256,
    symlink,
)

from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import BuildError, UsageError, VerificationError
from smolbuild.core.events import silent
from smolbuild.model.oci import Descriptor
from smolbuild.source.archive import load_archive
from smolbuild.source.image_config import parse_config
from smolbuild.source.merge import merge
from smolbuild.source.oci_layout import load_layout, open_layout_directory
from smolbuild.source.registry_image import load_registry_image, resolve_image
from smolbuild.source.rootfs import digest_tree, read_rootfs
from smolbuild.source.select import LocalImage, RegistryImage, select_image

LOWER = make_tar([directory("etc"), entry("etc/a", b"a"), entry("etc/b", b"b")])
UPPER = make_tar([entry("etc/.wh.a"), hardlink("c", "etc/b"), symlink("l", "/etc/b")])
MERGED = {"etc": "directory", "etc/b": b"b", "c": b"b", "l": "-> /etc/b"}
REF = "org.opencontainers.image.ref.name"


def _tree(image, work):
    with ExitStack() as resources:
        return listing(merge(image, work, resources, silent))


def _simple(path: Path, **config) -> LayoutWriter:
    layout = LayoutWriter(path)
    packed = [gzip.compress(LOWER), zstandard.ZstdCompressor().compress(UPPER)]
    configuration = image_config([sha256(LOWER), sha256(UPPER)], **config)
    manifest = layout.manifest(packed, [LOWER, UPPER], configuration)
    layout.write([{**manifest, "annotations": {REF: "v1"}}])
    return layout


def _load(path: Path, selector: str = ""):
    return load_layout(open_layout_directory(path), selector, what=str(path))


def test_a_layout_is_merged_and_its_configuration_read(tmp_path):
    _simple(
        tmp_path / "layout",
        Env=["A=1", "B=x=y", "A=2", "=junk"],
        WorkingDir="/srv",
        User="1:2",
        Entrypoint=["/bin/e"],
        Cmd=["c", "d"],
    )
    image = _load(tmp_path / "layout")
    assert _tree(image, tmp_path) == MERGED
    assert image.config.env == (("A", "2"), ("B", "x=y"))
    assert (image.config.workdir, image.config.user) == ("/srv", "1:2")
    assert (image.config.entrypoint, image.config.cmd) == (("/bin/e",), ("c", "d"))
    index = json.loads((tmp_path / "layout/index.json").read_text())
    assert image.digest == index["manifests"][0]["digest"]


def test_selection_by_name_and_digest(tmp_path):
    layout = LayoutWriter(tmp_path / "layout")
    one = layout.manifest([gzip.compress(LOWER)], [LOWER])
    two = layout.manifest([gzip.compress(UPPER)], [UPPER])
    layout.write(
        [
            {**one, "annotations": {REF: "one"}},
            {**two, "annotations": {REF: "registry.example.com/x/y:two"}},
        ]
    )
    assert _load(tmp_path / "layout", "one").digest == one["digest"]
    assert _load(tmp_path / "layout", "two").digest == two["digest"]
    assert _load(tmp_path / "layout", "registry.example.com/x/y:two").digest == two["digest"]
    assert _load(tmp_path / "layout", two["digest"]).digest == two["digest"]
    with pytest.raises(UsageError, match="2 images: say which") as caught:
        _load(tmp_path / "layout")
    assert "one" in caught.value.hint
    with pytest.raises(UsageError, match="no image named 'three'"):
        _load(tmp_path / "layout", "three")
    with pytest.raises(VerificationError, match="no image with the digest"):
        _load(tmp_path / "layout", "sha256:" + "0" * 64)
    with pytest.raises(UsageError, match="not a sha256 digest"):
        _load(tmp_path / "layout", "sha256:short")


def test_a_nested_index_gives_our_platform(tmp_path):
    layout = LayoutWriter(tmp_path / "layout")
    ours = layout.manifest([gzip.compress(LOWER)], [LOWER])
    other = layout.manifest([gzip.compress(UPPER)], [UPPER])
    inner = layout.index(
        [
            {**other, "platform": {"os": "linux", "architecture": "arm64"}},
            {**other, "platform": {"os": "unknown", "architecture": "unknown"}},
            {**ours, "platform": {"os": "linux", "architecture": "amd64"}},
        ]
    )
    layout.write([inner])
    assert _load(tmp_path / "layout").digest == ours["digest"]

    arm = layout.index([{**other, "platform": {"os": "linux", "architecture": "arm64"}}])
    layout.write([arm])
    with pytest.raises(BuildError, match=r"no image for linux/amd64; it has: linux/arm64"):
        _load(tmp_path / "layout")


def test_a_configuration_for_another_machine_is_refused():
    data = json.dumps({"architecture": "arm64", "os": "linux", "rootfs": {}}).encode()
    with pytest.raises(BuildError, match="linux/arm64"):
        parse_config(data, "x")


@pytest.mark.parametrize("part", ["manifest", "config", "layer", "diff_id"])
def test_tampering_is_noticed(tmp_path, part):
    layout = _simple(tmp_path / "layout")
    index = json.loads((layout.directory / "index.json").read_text())
    blobs = layout.directory / "blobs/sha256"
    manifest_path = blobs / index["manifests"][0]["digest"][7:]
    manifest = json.loads(manifest_path.read_text())
    if part == "manifest":
        manifest_path.write_bytes(manifest_path.read_bytes() + b" ")
    elif part == "config":
        path = blobs / manifest["config"]["digest"][7:]
        path.write_bytes(path.read_bytes().replace(b"linux", b"linuX"))
    elif part == "layer":
        path = blobs / manifest["layers"][0]["digest"][7:]
        path.write_bytes(gzip.compress(make_tar([entry("evil", b"x")])))
    else:
        wrong = layout.manifest([gzip.compress(LOWER)], [LOWER], image_config([sha256(UPPER)]))
        layout.write([wrong])
    with pytest.raises(VerificationError, match=r"digest|unpacks to"):
        _tree(_load(layout.directory), tmp_path)


def test_a_missing_blob_is_named(tmp_path):
    layout = _simple(tmp_path / "layout")
    for path in (layout.directory / "blobs/sha256").iterdir():
        path.unlink()
    with pytest.raises(BuildError, match="blobs/sha256"):
        _load(layout.directory)


def _archive_of(path: Path, target: Path, mode: str = "w") -> Path:
    with tarfile.open(target, mode) as tar:
        for item in sorted(path.rglob("*")):
            tar.add(item, item.relative_to(path), recursive=False)
    return target


@pytest.mark.parametrize("mode", ["w", "w:gz", "zst"])
def test_an_oci_archive_is_the_same_image_as_its_layout(tmp_path, mode):
    _simple(tmp_path / "layout")
    archive = _archive_of(tmp_path / "layout", tmp_path / "a.tar", mode if mode != "zst" else "w")
    if mode == "zst":
        archive.write_bytes(zstandard.ZstdCompressor().compress(archive.read_bytes()))
    with load_archive(archive, "", tmp_path) as image:
        assert image.digest == _load(tmp_path / "layout").digest
        assert _tree(image, tmp_path) == MERGED


def _docker_archive(target: Path, *, config: bytes | None = None, tags=("x:1",)) -> Path:
    config = config or image_config([sha256(LOWER), sha256(LOWER), sha256(UPPER)], User="u")
    manifest = [
        {
            "Config": f"{sha256(config)[7:]}.json",
            "RepoTags": list(tags),
            "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"],
        }
    ]
    target.write_bytes(
        make_tar(
            [
                directory("1"),
                entry("1/layer.tar", LOWER),
                directory("2"),
                symlink("2/layer.tar", "../1/layer.tar"),  # as older versions save a shared layer
                entry("3/layer.tar", UPPER),
                entry(f"{sha256(config)[7:]}.json", config),
                entry("manifest.json", json.dumps(manifest).encode()),
            ]
        )
    )
    return target


def test_a_docker_archive(tmp_path):
    archive = _docker_archive(tmp_path / "a.tar")
    with load_archive(archive, "", tmp_path) as image:
        assert _tree(image, tmp_path) == MERGED
        assert image.config.user == "u"
    with load_archive(archive, "x:1", tmp_path) as again, load_archive(archive, "1", tmp_path) as s:
        assert again.digest == s.digest == image.digest
    with (
        pytest.raises(UsageError, match="no image named 'y'"),
        load_archive(archive, "y", tmp_path),
    ):
        pass
    other = image_config([sha256(LOWER), sha256(LOWER), sha256(UPPER)], User="v")
    with load_archive(_docker_archive(tmp_path / "b.tar", config=other), "", tmp_path) as image_b:
        assert image_b.digest != image.digest


def test_a_docker_archive_with_another_layer_is_refused(tmp_path):
    config = image_config([sha256(LOWER), sha256(UPPER), sha256(UPPER)])
    archive = _docker_archive(tmp_path / "a.tar", config=config)
    with (
        load_archive(archive, "", tmp_path) as image,
        pytest.raises(VerificationError, match="instead of"),
    ):
        _tree(image, tmp_path)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (make_tar([entry("bin/sh", b"x")]), BuildError),
        (make_tar([entry("manifest.json", b"[")]), VerificationError),
        (make_tar([entry("manifest.json", b"{}")]), VerificationError),
        (make_tar([entry("manifest.json", b'[{"Config": 1}]')]), VerificationError),
        (make_tar([entry("manifest.json", b'[{"Config": "../x", "Layers": []}]')]), BuildError),
        (make_tar([entry("manifest.json", b"[]")]), UsageError),
        (make_tar([entry("oci-layout", b""), entry("index.json", b"[]")]), VerificationError),
        (make_tar([symlink("manifest.json", "manifest.json")]), BuildError),
        (b"not a tar at all", BuildError),
        (b"", BuildError),
    ],
)
def test_archives_that_are_no_image(tmp_path, data, error):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(error) as caught, load_archive(path, "", tmp_path):
        pass
    assert "a.tar" in caught.value.message


class Registry:
    """An ``ImageFetcher`` over a layout directory; counts what is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[str] = []

    def _read(self, digest: str) -> bytes:
        self.asked.append(digest)
        return (self.path / "blobs/sha256" / digest[7:]).read_bytes()

    def resolve(self, reference: str) -> Descriptor:
        (first,) = json.loads((self.path / "index.json").read_text())["manifests"]
        return Descriptor(media_type=first["mediaType"], digest=first["digest"], size=first["size"])

    def manifest(self, reference: str, digest: str) -> bytes:
        return self._read(digest)

    def blob(self, reference: str, descriptor: Descriptor, into: io.BufferedIOBase) -> None:
        into.write(self._read(descriptor.digest))


def test_an_image_in_a_registry_is_pulled_once(tmp_path):
    layout = _simple(tmp_path / "layout")
    (manifest,) = json.loads((layout.directory / "index.json").read_text())["manifests"]
    arm = {"os": "linux", "architecture": "arm64", "variant": "v8"}
    unknown = {"os": "unknown", "architecture": "unknown"}
    other = {**manifest, "digest": "sha256:" + "0" * 64}
    inner = layout.index(
        [
            {**other, "platform": arm},
            {**manifest, "platform": {"os": "linux", "architecture": "amd64"}},
            {**other, "platform": unknown},
        ]
    )
    layout.write([inner])
    registry = Registry(layout.directory)
    locked = resolve_image("registry.example.com/x:1", registry)
    assert (locked.digest, locked.platform_digest) == (inner["digest"], manifest["digest"])
    assert locked.platforms == (
        ("linux/amd64", manifest["digest"]),
        ("linux/arm64/v8", other["digest"]),
    )
    for _ in range(2):
        image = load_registry_image(locked, tmp_path / "cache", registry)
        assert image.digest == manifest["digest"]
        assert _tree(image, tmp_path) == MERGED
    pulled = [digest for digest in registry.asked if digest != inner["digest"]]
    assert pulled.count(manifest["digest"]) == 2, "once to resolve, once to load"
    assert len(pulled) == 2 + 1 + 2, "each blob once"


def test_a_registry_that_sends_other_bytes(tmp_path):
    layout = _simple(tmp_path / "layout")
    registry = Registry(layout.directory)
    locked = resolve_image("x", registry)
    cache = tmp_path / "cache"
    image = load_registry_image(locked, cache, registry)
    blob = layout.directory / "blobs/sha256" / image.layers[0].digest[7:]
    good = blob.read_bytes()
    for bad in (good[:-1], good + b"x", b"\0" + good[1:]):
        blob.write_bytes(bad)
        with pytest.raises(VerificationError, match=r"digest|descriptor"):
            _tree(image, tmp_path)
        assert not (cache / "blobs" / image.layers[0].digest[7:]).exists()
        assert not list((cache / "blobs").glob(".tmp*"))
    blob.write_bytes(good)
    assert _tree(image, tmp_path) == MERGED


def test_a_cached_blob_that_rots_is_noticed(tmp_path):
    registry = Registry(_simple(tmp_path / "layout").directory)
    locked = resolve_image("x", registry)
    image = load_registry_image(locked, tmp_path / "cache", registry)
    _tree(image, tmp_path)
    path = tmp_path / "cache/blobs" / image.layers[1].digest[7:]
    path.write_bytes(path.read_bytes()[:-4] + b"rott")
    with pytest.raises(VerificationError):
        _tree(image, tmp_path)


def _unpacked(path: Path) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin/tool").write_bytes(b"\x7fELF")
    (path / "bin/tool").chmod(0o4755)
    os.link(path / "bin/tool", path / "bin/alias")
    (path / "escape").symlink_to("/etc/passwd")
    (path / "dirlink").symlink_to("bin")
    os.mkfifo(path / "pipe")
    return path


def test_an_unpacked_root_is_read_without_following_links(tmp_path):
    root = _unpacked(tmp_path / "root")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(root / "socket"))
        tree = read_rootfs(root)
    assert listing(tree) == {
        "bin": "directory",
        "bin/tool": b"\x7fELF",
        "bin/alias": b"\x7fELF",
        "escape": "-> /etc/passwd",
        "dirlink": "-> bin",
        "pipe": "fifo",
    }
    assert tree.find(b"bin/tool") is tree.find(b"bin/alias")
    assert tree.find(b"bin/tool").mode == 0o4755
    assert tree.find(b"bin/tool").uid == 0, "the invoking user's files belong to root"


def test_the_digest_of_a_root_ignores_times_and_sees_everything_else(tmp_path):
    one = _unpacked(tmp_path / "one")
    base = digest_tree(read_rootfs(one))
    os.utime(one / "bin/tool", (1, 1))
    assert digest_tree(read_rootfs(one)) == base
    assert digest_tree(read_rootfs(_unpacked(tmp_path / "two"))) == base
    changes = [
        lambda: (one / "bin/tool").chmod(0o755),
        lambda: (one / "bin/tool").write_bytes(b"\x7fELG"),
        (one / "bin/alias").unlink,
        lambda: (one / "bin/alias").write_bytes(b"\x7fELG"),  # a copy instead of a link
        (one / "escape").unlink,
        lambda: (one / "escape").symlink_to("/etc/shadow"),
        (one / "empty").mkdir,
    ]
    seen = {base}
    for change in changes:
        change()
        digest = digest_tree(read_rootfs(one))
        assert digest not in seen
        seen.add(digest)


def test_a_root_that_changes_while_it_is_read(tmp_path):
    root = _unpacked(tmp_path / "root")
    tree = read_rootfs(root)
    (root / "bin/tool").write_bytes(b"longer than before")
    with pytest.raises(BuildError, match=r"bin/(tool|alias) changed"):
        digest_tree(tree)
    (root / "bin/tool").unlink()
    (root / "bin/alias").unlink()
    (root / "bin/alias").symlink_to("/etc/passwd")
    (root / "bin/tool").symlink_to("/etc/passwd")
    with pytest.raises(BuildError, match="cannot read"):
        digest_tree(tree)


def test_an_unreadable_file_is_an_error_not_a_gap(tmp_path):
    root = _unpacked(tmp_path / "root")
    (root / "secret").write_bytes(b"x")
    (root / "secret").chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(BuildError, match="secret"):
            read_rootfs(root)
        return
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from smolbuild.core.errors import BuildError\n"
        "from smolbuild.source.rootfs import read_rootfs\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: read_rootfs(Path(sys.argv[1]))\n"
        "except BuildError as error: print(error.message)\n"
    )
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o755)

    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True
    )
    assert "secret" in done.stdout
    assert "permission denied" in done.stdout.lower()


def test_what_an_image_string_stands_for(tmp_path):
    _simple(tmp_path / "layout")
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / "with:colon.tar").write_bytes(b"")
    (tmp_path / "root").mkdir()

    def chosen(image: str):
        found = select_image(image, tmp_path)
        if isinstance(found, RegistryImage):
            return found.reference
        return found.kind, found.path.relative_to(tmp_path).as_posix(), found.selector

    digest = "sha256:" + "a" * 64
    assert chosen("./layout") == ("layout", "layout", "")
    assert chosen("./layout:v1") == ("layout", "layout", "v1")
    assert chosen(f"./layout@{digest}") == ("layout", "layout", digest)
    assert chosen("./layout:registry.example.com/x:v1")[2] == "registry.example.com/x:v1"
    assert chosen(str(tmp_path / "layout")) == ("layout", "layout", "")
    assert chosen("a.tar") == ("archive", "a.tar", "")
    assert chosen("./a.tar:x:1") == ("archive", "a.tar", "x:1")
    assert chosen("./with:colon.tar") == ("archive", "with:colon.tar", "")
    assert chosen("./root") == ("rootfs", "root", "")
    for reference in ("debian", "debian:12-slim", f"registry.example.com/a/b:1@{digest}"):
        assert chosen(reference) == reference
    assert isinstance(select_image("./root", tmp_path), LocalImage)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("docker-daemon:", "docker-daemon:NAME"),
        ("docker-daemon:a b", "docker-daemon:NAME"),
        ("-", "standard input"),
        ("./nothing", "does not exist"),
        ("missing.tar.gz", "does not exist"),
        ("./root:tag", "not an OCI layout"),
        ("UPPER CASE", "not a valid reference"),
    ],
)
def test_image_strings_that_stand_for_nothing(tmp_path, image, message):
    (tmp_path / "root").mkdir()
    with pytest.raises(UsageError, match=message) as caught:
        select_image(image, tmp_path)
    assert caught.value.hint


def test_digest_in_the_index_is_of_the_manifest_bytes(tmp_path):
    layout = _simple(tmp_path / "layout")
    (manifest,) = json.loads((layout.directory / "index.json").read_text())["manifests"]
    data = (layout.directory / "blobs/sha256" / manifest["digest"][7:]).read_bytes()
    assert _load(layout.directory).digest == digest_bytes(data)
