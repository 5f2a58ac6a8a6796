"""What somebody deleted or cut short is noticed before it is used."""

import shutil

import pytest

from smolbuild.core.events import silent
from smolbuild.store.artifact import load_whole
from smolbuild.store.materialise import materialise


def truncate(path):
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1)


@pytest.mark.parametrize(
    "name", ["base.raw", "disk.*.qcow2", "memory.raw", "state.bin", "kernel", "initrd"]
)
@pytest.mark.parametrize("damage", [truncate, lambda path: path.unlink()])
def test_a_damaged_materialised_file_is_made_anew(packed, name, damage):
    artifact = packed.pack()
    files = materialise(packed.store, artifact, packed.root, emit=silent)
    (damaged,) = files.directory.glob(name)
    good = damaged.read_bytes()
    damage(damaged)
    again = materialise(packed.store, artifact, packed.root, emit=silent)
    assert (again.directory / damaged.name).read_bytes() == good


def test_an_emptied_materialised_directory_is_made_anew(packed, disk_of):
    artifact = packed.pack()
    files = materialise(packed.store, artifact, packed.root, emit=silent)
    shutil.rmtree(files.directory)
    files.directory.write_bytes(b"")
    again = materialise(packed.store, artifact, packed.root, emit=silent)
    assert disk_of(again) == packed.expected_disk()


@pytest.mark.parametrize("damage", [truncate, lambda path: path.unlink()])
def test_an_artifact_with_any_blob_missing_or_cut_short_is_not_whole(packed, damage):
    artifact = packed.pack()
    descriptor = artifact.index.descriptor
    assert load_whole(packed.store, descriptor) == artifact
    for blob in (descriptor, artifact.manifest.descriptor, *artifact.manifest.layers):
        path = packed.store.path(blob.digest)
        good = path.read_bytes()
        damage(path)
        assert load_whole(packed.store, descriptor) is None
        path.write_bytes(good)
    assert load_whole(packed.store, descriptor) == artifact
