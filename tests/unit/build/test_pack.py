import contextlib
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import HostError, VerificationError
from smolbuild.core.events import silent
from smolbuild.model.artifact import decode_config, encode_config
from smolbuild.store import chunks as chunks_module
from smolbuild.store import materialise as materialise_module
from smolbuild.store.artifact import load_artifact, open_artifact
from smolbuild.store.disk import DiskReader
from smolbuild.store.materialise import (
    forget_materialised,
    materialise,
    materialised_digests,
    materialising,
)
from smolbuild.store.remove import remove_names


def left_in(root):
    """Return the files that are no locks."""
    return [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_what_comes_out_is_what_went_in(packed, disk_of):
    artifact = packed.pack()
    files = materialise(packed.store, artifact, packed.root, emit=silent)
    assert disk_of(files) == packed.expected_disk()
    assert files.memory.read_bytes() == packed.memory.read_bytes()
    assert files.state.read_bytes() == packed.state.read_bytes()
    assert files.kernel.read_bytes() == packed.kernel.read_bytes()
    assert files.initrd.read_bytes() == packed.initrd.read_bytes()
    assert files.base.stat().st_blocks * 512 < 16 << 20
    assert files.overlay.stat().st_size < 3 << 20
    assert files.directory.stat().st_mode & 0o777 == 0o700


def test_the_same_machine_packs_to_the_same_digest_and_the_base_is_remembered(packed):
    first = packed.pack()
    packed.base.write_bytes(b"never read again")
    assert packed.pack().index.descriptor.digest == first.index.descriptor.digest


def test_a_delta_ships_only_its_own_blocks(packed):
    artifact = packed.pack()
    base, (one, two) = artifact.config.disk.base, artifact.config.disk.deltas
    assert [delta.step for delta in (one, two)] == ["one", "services"]
    assert one.zeros == ((9 * 16, 1),)
    assert sum(count for _, count in one.blocks) == 2 + 16
    assert sum(count for _, count in two.blocks) == 1 + 1
    assert sum(chunk.layer is not None for chunk in base.chunks) == 2


def test_materialising_again_costs_nothing_and_can_be_asked_for(packed):
    artifact = packed.pack()
    files = materialise(packed.store, artifact, packed.root, emit=silent)
    before = files.memory.stat().st_ino
    for digest in list(packed.store.blobs()):
        if digest not in (
            artifact.index.descriptor.digest,
            artifact.manifest.descriptor.digest,
            artifact.manifest.config.digest,
        ):
            packed.store.path(digest).rename(packed.store.path(digest).with_suffix(".away"))
    again = materialise(packed.store, artifact, packed.root, emit=silent)
    assert again.memory.stat().st_ino == before
    with (
        pytest.raises(VerificationError, match="lacks blob"),
        materialising(packed.store, artifact, packed.root, emit=silent),
    ):
        pass
    assert not files.directory.exists()
    assert list(packed.root.glob(".tmp-*")) == []


def test_every_layer_is_checked_before_the_directory_appears(packed):
    artifact = packed.pack()
    for layer in artifact.manifest.layers:
        path = packed.store.path(layer.digest)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(VerificationError):
            materialise(packed.store, artifact, packed.root, emit=silent)
        assert left_in(packed.root) == []
        path.write_bytes(good)


def test_artifacts_with_one_base_share_it_until_the_last_is_gone(packed, disk_of):
    first, second = packed.pack("x"), packed.pack("y")
    assert first.manifest != second.manifest
    one, two = (
        materialise(packed.store, artifact, packed.root, emit=silent)
        for artifact in (first, second)
    )
    assert one.base.samefile(two.base)
    assert disk_of(one) == disk_of(two)
    forget_materialised(packed.root, first.manifest.descriptor.digest)
    assert disk_of(two) == packed.expected_disk()
    forget_materialised(packed.root, second.manifest.descriptor.digest)
    assert left_in(packed.root) == []


def test_what_is_refused_in_the_block_does_not_stay(packed):
    artifact = packed.pack()
    with contextlib.suppress(ZeroDivisionError):
        with materialising(packed.store, artifact, packed.root, emit=silent) as files:
            assert files.memory.read_bytes() == packed.memory.read_bytes()
            raise ZeroDivisionError
        pytest.fail("the error was swallowed")
    assert left_in(packed.root) == []
    with materialising(packed.store, artifact, packed.root, emit=silent) as files:
        assert materialised_digests(packed.root) == ()
    assert materialised_digests(packed.root) == (artifact.manifest.descriptor.digest,)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 26), st.integers(0, 1 << 17)), max_size=20))
def test_a_disk_is_read_in_pieces_as_it_is_as_a_whole(whole, ranges):
    disk, expected = whole
    for offset, length in ranges:
        assert disk.read(offset, length) == expected[offset : offset + length]


def test_what_a_disk_says_to_be_holes_is_zero(whole):
    disk, expected = whole
    holes = bytearray(expected)
    for start, end in disk.data():
        holes[start:end] = bytes(end - start)
    assert not any(holes)


@pytest.fixture
def whole(packed):
    files = materialise(packed.store, packed.pack(), packed.root, emit=silent)
    with DiskReader.of(files) as disk:
        yield disk, packed.expected_disk()


def test_too_little_space_is_said_before_anything_is_written(packed, monkeypatch):
    def refuse(*_, **__):
        raise HostError("no space")

    artifact = packed.pack()
    monkeypatch.setattr(materialise_module, "require_space", refuse)
    with pytest.raises(HostError):
        materialise(packed.store, artifact, packed.root, emit=silent)
    assert list(packed.root.glob("[!.]*")) == []


def test_leftovers_of_a_killed_materialisation_are_swept(packed):
    artifact = packed.pack()
    left = packed.root / f".tmp-{artifact.manifest.descriptor.digest[7:]}"
    left.mkdir()
    (left / "disk.raw").write_bytes(b"half")
    files = materialise(packed.store, artifact, packed.root, emit=silent)
    assert files.base.exists()
    assert not left.exists()
    forget_materialised(packed.root, artifact.manifest.descriptor.digest)
    forget_materialised(packed.root, artifact.manifest.descriptor.digest)
    assert not files.directory.exists()


def test_removing_sweeps_what_is_materialised_and_named_by_nothing(packed):
    old, new = packed.pack("x"), packed.pack("y")
    for artifact in (old, new):
        materialise(packed.store, artifact, packed.root, emit=silent)
        packed.store.name(artifact.index.descriptor, "x:latest")
    other = packed.pack("z")
    packed.store.name(other.index.descriptor, "z:latest")
    assert len(materialised_digests(packed.root)) == 2
    remove_names(packed.store, packed.root, ["z:latest"])
    assert materialised_digests(packed.root) == (new.manifest.descriptor.digest,)
    remove_names(packed.store, packed.root, ["x:latest"])
    assert materialised_digests(packed.root) == ()
    assert list(packed.store.blobs()) == []


def test_artifacts_are_opened_by_name(packed):
    artifact = packed.pack("acme/x")
    packed.store.name(artifact.index.descriptor, "acme/x:latest")
    assert open_artifact(packed.store, "acme/x") == artifact


def test_a_config_round_trips_and_a_newer_format_is_a_clear_error(packed):
    data = encode_config(packed.pack().config)
    assert encode_config(decode_config(data)) == data
    newer = json.dumps({**json.loads(data), "formatVersion": 2}).encode()
    with pytest.raises(VerificationError, match="format version 2") as caught:
        decode_config(newer)
    assert caught.value.code == "format-version"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda c: c["disk"]["base"].update(size=1), "disk base"),
        (lambda c: c["memory"]["chunks"].pop(), "do not add up"),
        (lambda c: c["memory"]["chunks"][0].update(length=5), "wrong length"),
        (lambda c: c["memory"].update(chunkSize=1 << 40), "out of range"),
        (lambda c: c["disk"]["deltas"][0]["blocks"].append([10**9, 1]), "outside the disk"),
        (lambda c: c["disk"]["deltas"][0]["blocks"].append([0, 1]), "differ in size"),
        (lambda c: c["shape"].update(memoryMib=1), "memory size"),
        (lambda c: c["kernel"].update(length=-1), "out of range"),
        (lambda c: c["kernel"].update(sha256="nope"), "not a sha256"),
        (lambda c: c.update(extra=1), "unknown member"),
    ],
)
def test_a_config_that_does_not_add_up_is_refused(packed, change, where):
    value = json.loads(encode_config(packed.pack().config))
    change(value)
    with pytest.raises(VerificationError, match=where):
        decode_config(json.dumps(value).encode())


@given(st.binary(max_size=200))
def test_rubbish_is_never_more_than_our_error(data):
    with pytest.raises(VerificationError):
        decode_config(data)


def test_an_index_without_a_machine_is_not_an_artifact(packed):
    from smolbuild.model.oci import INDEX_TYPE, describe, encode_json

    data = encode_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []})
    packed.store.add_bytes(data)
    with pytest.raises(VerificationError, match="not a smolbuild artifact"):
        load_artifact(packed.store, describe(data, INDEX_TYPE))


def test_swapped_layers_are_noticed(packed):
    artifact = packed.pack()
    layers = list(artifact.manifest.layers)
    layers[0], layers[1] = layers[1], layers[0]
    swapped = dataclasses.replace(
        artifact, manifest=dataclasses.replace(artifact.manifest, layers=tuple(layers))
    )
    with pytest.raises(VerificationError):
        materialise(packed.store, swapped, packed.root, emit=silent)
    assert left_in(packed.root) == []


def test_a_delta_that_was_packed_is_not_compressed_again(packed, monkeypatch):
    first = packed.pack("x")
    compressed = []
    real = chunks_module._compress
    monkeypatch.setattr(
        chunks_module, "_compress", lambda data: compressed.append(len(data)) or real(data)
    )
    second = packed.pack("y")
    one, two = (artifact.config.disk.deltas[0] for artifact in (first, second))
    assert one == two
    assert one.data.size not in compressed  # the delta without a note is, and so is the memory
    assert compressed
    layer = first.manifest.layers[one.data.chunks[0].layer]
    packed.store.path(layer.digest).unlink()
    packed.pack("z")
    assert packed.store.has(layer.digest, layer.size)
