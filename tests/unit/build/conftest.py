"""A small machine's files, packed: what pack, materialise and gate are tested with."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from smolbuild.build.pack import (
    Overlay,
    encode_agent_cursor,
    pack_artifact,
    pack_streams,
    shipped_deltas,
)
from smolbuild.core.digest import digest_bytes, digest_file
from smolbuild.core.events import silent
from smolbuild.core.process import run
from smolbuild.machine.base import Checkpoint, Disk
from smolbuild.model.artifact import FORMAT_VERSION, ArtifactConfig, Results, RunConfig
from smolbuild.model.contract import Contract, Shape
from smolbuild.model.key import provenance_key
from smolbuild.model.keytree import KeyTree
from smolbuild.model.smolfile import Network, RestoreContract
from smolbuild.store.artifact import Artifact
from smolbuild.store.disk import DiskReader
from smolbuild.store.layout import Store
from smolbuild.store.qcow2 import create_overlay

DISK = 64 << 20
MIB = 1 << 20

CONTRACT = Contract(
    engine="qemu",
    engine_version="7.2",
    machine_type="microvm",
    cpu_model="max",
    accelerator="tcg",
    architecture="amd64",
)


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def qemu_io(image: str, *commands: str) -> None:
    argv = ["qemu-io"]
    for command in commands:
        argv += ["-c", command]
    done = run([*argv, image], timeout=60)
    assert done.status == 0, done.stdout + done.stderr


@pytest.fixture
def packed(tmp_path):
    """Pack a base disk, two overlays, a sparse memory and a state; give all of it."""
    base = tmp_path / "base.raw"
    with base.open("wb") as stream:
        stream.truncate(DISK)
    write_at(base, 0, b"BASE" * 1000)
    write_at(base, 9 * MIB, os.urandom(300_000))
    first, second = tmp_path / "one.qcow2", tmp_path / "two.qcow2"
    create_overlay(first, DISK)
    create_overlay(second, DISK)
    qemu_io(
        f"json:{_json(first, base)}",
        "write -P 0x41 1M 100k",
        "write -z 9M 64k",
        "write -P 0x42 63M 1M",
    )
    qemu_io(f"json:{_json(second, first, base)}", "write -P 0x43 1M 4k", "write -P 0x44 33M 64k")
    memory = tmp_path / "memory.raw"
    with memory.open("wb") as stream:
        stream.truncate(64 * MIB)
    write_at(memory, 20 * MIB + 4096, b"RAM" * 10_000)
    state = tmp_path / "state.bin"
    state.write_bytes(b"STATE" * 999)
    kernel, initrd = tmp_path / "kernel", tmp_path / "initrd"
    kernel.write_bytes(b"KERNEL" * 100)
    initrd.write_bytes(b"INITRD" * 100)
    checkpoint = Checkpoint(
        memory=memory,
        state=state,
        disk_overlay=second,
        disk=Disk(base=base, overlays=(first, second)),
        contract=CONTRACT,
        agent_cursor=b"cursor",
    )
    store = Store(tmp_path / "store")
    (tmp_path / "materialised").mkdir()
    cache = tmp_path / "cache"
    base_digest = digest_file(base)

    def pack(name: str = "x", tree: KeyTree | None = None):
        streams = pack_streams(
            store,
            base=base,
            base_digest=base_digest,
            deltas=shipped_deltas(
                [
                    Overlay(step="one", path=first, note=tmp_path / "note.json"),
                    Overlay(step="services", path=second),
                ],
                only_seen=False,
            ),
            checkpoint=checkpoint,
            kernel=kernel,
            initrd=initrd,
            cache=cache,
            emit=silent,
        )
        made = config(streams, name)
        if tree is not None:
            made = replace(made, key=provenance_key(tree), key_tree=tree.to_json())
        return pack_artifact(store, made, streams.layers)

    def repack(made: ArtifactConfig, artifact: Artifact) -> Artifact:
        return pack_artifact(store, made, artifact.manifest.layers)

    return SimpleNamespace(
        store=store,
        pack=pack,
        repack=repack,
        base=base,
        first=first,
        second=second,
        memory=memory,
        state=state,
        kernel=kernel,
        initrd=initrd,
        root=tmp_path / "materialised",
        expected_disk=lambda: _flat(tmp_path, second, first, base),
    )


@pytest.fixture
def disk_of():
    """Give the function that reads the whole disk of materialised files."""

    def read(files) -> bytes:
        with DiskReader.of(files) as disk:
            return disk.read(0, disk.size)

    return read


@pytest.fixture
def config_for():
    """Give the function that makes a config for packed streams."""
    return config


def _json(overlay: Path, *below: Path) -> str:
    def node(paths):
        path, *rest = paths
        file = {"driver": "file", "filename": str(path)}
        if not rest:
            return {"driver": "raw", "file": file}
        return {"driver": "qcow2", "file": file, "backing": node(rest)}

    return json.dumps(node([overlay, *below]))


def _flat(tmp_path: Path, *chain: Path) -> bytes:
    flat = tmp_path / "flat.raw"
    done = run(["qemu-img", "convert", "-O", "raw", f"json:{_json(*chain)}", str(flat)], timeout=60)
    assert done.status == 0, done.stderr
    return flat.read_bytes()


def config(streams, name: str) -> ArtifactConfig:
    return ArtifactConfig(
        format_version=FORMAT_VERSION,
        name=name,
        key=digest_bytes(b"key"),
        key_tree={},
        created="2026-01-01T00:00:00Z",
        os="linux",
        shape=Shape(cpus=1, memory_mib=64, disk_bytes=DISK),
        contract=CONTRACT,
        agent_cursor=encode_agent_cursor(b"cursor"),
        disk=streams.disk,
        memory=streams.memory,
        device_state=streams.device_state,
        kernel=streams.kernel,
        initrd=streams.initrd,
        run=RunConfig(env=(), workdir="/", user="root", entrypoint=(), cmd=()),
        network=Network(),
        services=(),
        health=None,
        restore=RestoreContract(),
        results=Results(health="", ready_ms={}),
    )
