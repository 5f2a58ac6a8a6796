"""How two artifacts of the local store differ: inputs, packages, files, what runs, sizes, time."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from smolbuild.build.disk_diff import FileChange, compare_files, differing_ranges
from smolbuild.build.explain import side_of
from smolbuild.build.line_notes import line_words, read_notes
from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.core.events import Emit
from smolbuild.core.home import Home
from smolbuild.model.explain import explain
from smolbuild.model.inside import GuestPort, GuestProcess
from smolbuild.model.keytree import Change
from smolbuild.model.packages import PackageChange, compare_packages
from smolbuild.source.ext4_reader import Ext4, Node
from smolbuild.source.package_db import Packages, ReadFile, read_packages
from smolbuild.source.tree import Kind
from smolbuild.store.artifact import Artifact
from smolbuild.store.disk import DiskReader
from smolbuild.store.evidence import StoreEvidence
from smolbuild.store.layout import Store
from smolbuild.store.materialise import materialise
from smolbuild.trust.bundle import parse_bundle
from smolbuild.trust.referrer import parse_referrer
from smolbuild.trust.statement import TEST_RESULT_TYPE, parse_statement

__all__ = ["Came", "Comparison", "compare_artifacts", "ready_times"]

_READY = re.compile(r"restore-proof .*: ([0-9]{1,9}) ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What is only in one of two artifacts: ``new`` is what came, ``old`` what went."""

    old: tuple[GuestProcess, ...] | tuple[GuestPort, ...]
    new: tuple[GuestProcess, ...] | tuple[GuestPort, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs from one artifact to another."""

    inputs: tuple[Change, ...]
    packages: Mapping[str, tuple[PackageChange, ...]]
    """By the program that manages them; without those in which nothing differs."""
    files: tuple[FileChange, ...]
    processes: Came
    ports: Came
    shared_bytes: int
    """Packed bytes of blobs that are in both."""
    ready_ms: tuple[tuple[int, ...], tuple[int, ...]]
    """Milliseconds to ready of the forks that proved each; empty: not attested here."""


@dataclass(frozen=True, slots=True)
class _Disk:
    system: Ext4
    nodes: Mapping[bytes, Node]

    def packages(self) -> Packages:
        files = [path for path, node in self.nodes.items() if node.kind is Kind.FILE]
        return read_packages(files, _reader(self))


def compare_artifacts(
    home: Home, store: Store, old: Artifact, new: Artifact, *, emit: Emit
) -> Comparison:
    """Return how ``new`` differs from ``old``. Starts no machine; both disks are materialised.

    Raises:
        VerificationError: a blob is missing, or something in one of them is damaged.
        HostError: not enough space.

    """
    with ExitStack() as opened:
        before, after = (_open(opened, home, store, artifact, emit) for artifact in (old, new))
        ranges = differing_ranges(old.config.disk, new.config.disk)
        files = compare_files((before.system, before.nodes), (after.system, after.nodes), ranges)
        had, has = before.packages(), after.packages()
    results = old.config.results, new.config.results
    layers = {layer.digest: layer.size for layer in old.manifest.layers}
    return Comparison(
        inputs=_inputs(home, old, new),
        packages={
            manager: changes
            for manager in dict.fromkeys([*had, *has])
            if (changes := compare_packages(had.get(manager, {}), has.get(manager, {})))
        },
        files=files,
        processes=_came(results[0].processes, results[1].processes),
        ports=_came(results[0].ports, results[1].ports),
        shared_bytes=sum(
            {
                each.digest: each.size for each in new.manifest.layers if each.digest in layers
            }.values()
        ),
        ready_ms=(ready_times(store, old), ready_times(store, new)),
    )


def _inputs(home: Home, old: Artifact, new: Artifact) -> tuple[Change, ...]:
    had, has = (read_notes(home.cache, each.config.key) for each in (old, new))

    def lines(path: str, was: Digest, now: Digest) -> str:
        del path  # contents are noted by digest
        return line_words(had.get(was), has.get(now))

    return explain(side_of(old.config), side_of(new.config), lines=lines)


def ready_times(store: Store, artifact: Artifact) -> tuple[int, ...]:
    """Return the milliseconds to ready that ``artifact``'s test result attests, fork by fork.

    Who signed it was checked when the artifact was pulled; what is malformed says nothing.
    """
    subject = artifact.manifest.descriptor.digest
    evidence = StoreEvidence(store)
    for entry in store.referrers(subject):
        try:
            bundle = parse_referrer(evidence.manifest(entry), subject=subject)
            statement = parse_statement(parse_bundle(evidence.blob(bundle)).payload)
        except VerificationError:
            continue
        passed = statement.predicate.get("passedTests")
        if statement.predicate_type == TEST_RESULT_TYPE and isinstance(passed, list):
            found = (_READY.fullmatch(test) for test in passed if isinstance(test, str))
            return tuple(int(match[1]) for match in found if match)
    return ()


def _open(opened: ExitStack, home: Home, store: Store, artifact: Artifact, emit: Emit) -> _Disk:
    files = materialise(store, artifact, home.materialised, emit=emit)
    disk = opened.enter_context(DiskReader.of(files))
    system = Ext4(disk.read, disk.size)
    return _Disk(system, {node.path: node for node in system.walk()})


def _reader(disk: _Disk) -> ReadFile:
    def read(path: bytes, limit: int) -> bytes | None:
        node = disk.nodes.get(path)
        if node is None or node.kind is not Kind.FILE or node.size > limit:
            return None
        return b"".join(disk.system.content(node))

    return read


def _came(
    old: tuple[GuestProcess, ...] | tuple[GuestPort, ...],
    new: tuple[GuestProcess, ...] | tuple[GuestPort, ...],
) -> Came:
    return Came(
        old=tuple(each for each in old if each not in new),  # type: ignore[arg-type]
        new=tuple(each for each in new if each not in old),  # type: ignore[arg-type]
    )
