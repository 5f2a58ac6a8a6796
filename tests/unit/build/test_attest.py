"""How an artifact was made: what the provenance says, and that it travels like a signature."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from testing_registry import FakeClock, FakeRegistry

from smolbuild.build.attest import BUILD_TYPE, attest_proof, attest_provenance
from smolbuild.build.plan import Plan
from smolbuild.build.publish import publish
from smolbuild.build.pull import pull_artifact
from smolbuild.build.sign import sign_artifact
from smolbuild.core.digest import digest_bytes, hex_of
from smolbuild.core.events import silent
from smolbuild.model.artifact import Results
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.egress import StepEgress
from smolbuild.model.lock import Lock, LockedDebian, LockedKernel, LockedPackage
from smolbuild.model.parse import parse_text
from smolbuild.model.reference import parse_reference
from smolbuild.registry.client import RegistryClient
from smolbuild.store.evidence import StoreEvidence
from smolbuild.store.layout import Store
from smolbuild.trust.keys import generate_key, load_private_key
from smolbuild.trust.statement import (
    MAX_STATEMENT_BYTES,
    PROVENANCE_TYPE,
    TEST_RESULT_TYPE,
    parse_statement,
)
from smolbuild.trust.verify import verify_signed

BASE, KERNEL, CONTENT = (digest_bytes(data) for data in (b"base", b"kernel", b"content"))
TEXT = """
[smolbuild]
name = "x"
[smolbuild.base]
debian = "bookworm"
[[smolbuild.step]]
name = "fetch"
run = "true"
secrets = ["TOKEN"]
"""
LOCK = Lock(
    debian=LockedDebian(
        suite="bookworm",
        variant="minbase",
        architecture="amd64",
        packages=(
            LockedPackage(
                name="libstdc++6", version="1:2~3", architecture="amd64", sha256="b" * 64
            ),
        ),
    ),
    kernel=LockedKernel(package="linux-image-6.1", version="6.1-1", sha256="c" * 64),
)
EGRESS = (
    StepEgress(step="fetch", host="a.example.com", port=443, status=200, sent=10, received=20),
    StepEgress(step="fetch", host="b.example.com", port=443, status=403, denied=True),
    StepEgress(step="services", host="a.example.com", port=443, status=200),
)


def plan_of(files: int = 1) -> Plan:
    entries = tuple(
        FileEntry(path=f"src/{n:05}", kind="file", digest=CONTENT, size=7) for n in range(files)
    )
    folder = FileEntry(path="src", kind="dir")
    return cast(
        "Plan",
        SimpleNamespace(
            smolfile=parse_text(TEXT, file="/somewhere/Smolfile"),
            name="x",
            key=digest_bytes(b"key"),
            lock=SimpleNamespace(lock=LOCK),
            local_base=False,
            base_digest=BASE,
            kernel_digest=KERNEL,
            files=DeclaredFiles(context=Path(), selections={"src": (folder, *entries)}),
        ),
    )


@pytest.fixture
def artifact(packed):
    made = packed.pack()
    return packed.repack(
        replace(made.config, results=Results(health="", ready_ms={}, egress=EGRESS)), made
    )


def statement_of(artifact, plan=None, **environment):
    return attest_provenance(
        plan or plan_of(), artifact, started=0, finished=90, environment=environment
    )


def test_the_provenance_says_from_what_it_was_made(artifact):
    made = parse_statement(statement_of(artifact).encode())
    assert made.predicate_type == PROVENANCE_TYPE
    assert made.subjects[0].digest == artifact.manifest.descriptor.digest
    definition, details = made.predicate["buildDefinition"], made.predicate["runDetails"]
    assert definition["buildType"] == BUILD_TYPE
    assert definition["externalParameters"] == {
        "smolfile": {"Smolfile": digest_bytes(TEXT.encode())},
        "name": "x",
        "key": digest_bytes(b"key"),
        "architecture": "amd64",
        "secrets": ["TOKEN"],
    }
    found = {
        entry.get("name") or entry["uri"]: entry["digest"]["sha256"]
        for entry in definition["resolvedDependencies"]
    }
    assert found == {
        "base": hex_of(BASE),
        "pkg:deb/debian/libstdc%2B%2B6@1%3A2~3?arch=amd64": "b" * 64,
        "linux-image-6.1 6.1-1": "c" * 64,
        "kernel": hex_of(KERNEL),
        "src/00000": hex_of(CONTENT),
    }
    times = details["metadata"]
    assert (times["startedOn"], times["finishedOn"]) == (
        "1970-01-01T00:00:00Z",
        "1970-01-01T00:01:30Z",
    )


def test_each_step_s_requests_are_a_byproduct(artifact):
    details = statement_of(artifact).predicate["runDetails"]
    seen = [entry["annotations"] for entry in details["byproducts"]]
    assert [entry["step"] for entry in seen] == ["fetch", "services"]
    hosts = [(request["host"], request["denied"]) for request in seen[0]["requests"]]
    assert hosts == [("a.example.com", False), ("b.example.com", True)]
    assert seen[0]["requests"][0]["received"] == 20


def test_no_path_of_this_machine_is_in_it(artifact):
    assert b"somewhere" not in statement_of(artifact).encode()


def test_two_builds_have_two_invocations_and_who_builds_can_be_named(artifact):
    first, second = (statement_of(artifact).predicate["runDetails"] for _ in range(2))
    assert first["metadata"]["invocationId"] != second["metadata"]["invocationId"]
    assert first["builder"]["id"].endswith("/local")
    ci = statement_of(artifact, SMOLBUILD_BUILDER_ID="https://ci.example.com/run/7")
    assert ci.predicate["runDetails"]["builder"]["id"] == "https://ci.example.com/run/7"


def test_many_files_are_one_dependency_that_still_fits(artifact):
    many = statement_of(artifact, plan_of(20_000))
    assert len(many.encode()) < MAX_STATEMENT_BYTES // 10
    entries = many.predicate["buildDefinition"]["resolvedDependencies"]
    (files,) = [entry for entry in entries if entry.get("name") == "declared files"]
    assert files["annotations"] == {"files": 20_000}


def test_attestations_are_pushed_pulled_and_verified_like_signatures(packed, artifact, tmp_path):
    generate_key(tmp_path / "key.pem")
    signer = load_private_key(tmp_path / "key.pem")
    keys = {signer.public.hint: signer.public}
    sign_artifact(
        packed.store, artifact, signer, (attest_proof(artifact, ()), statement_of(artifact)), now=0
    )
    packed.store.name(artifact.index.descriptor, "x:latest")
    worker = Store(tmp_path / "worker")
    with FakeRegistry() as registry, RegistryClient(registry.host, clock=FakeClock()) as client:
        place = parse_reference(f"{registry.host}/team/x:v1")
        publish(packed.store, artifact, place, client, emit=silent)
        before = registry.count("GET", "/referrers/")
        pull_artifact(worker, place, client, keys, emit=silent)
        lists = registry.count("GET", "/referrers/") - before
    assert lists == 2, "index and manifest: each is asked for once"
    for predicate in (PROVENANCE_TYPE, TEST_RESULT_TYPE):
        found = verify_signed(
            artifact.manifest.descriptor,
            StoreEvidence(worker),
            predicate_type=predicate,
            keys=keys,
        )
        assert found.key == signer.public
    assert found.statement.predicate["result"] == "PASSED"
