"""What a build attests of its artifact: that it was proven, and how it was made.

The provenance is SLSA v1 with the build type ``BUILD_TYPE``; ``docs/provenance.md`` says what its
parameters, dependencies and byproducts mean.
"""

import datetime as dt
import os
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from smolbuild import __version__
from smolbuild.build.plan import Plan
from smolbuild.build.result import Proof
from smolbuild.core.canon import Json, canonical_json
from smolbuild.core.codec import encode
from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.model.egress import StepEgress
from smolbuild.model.lock import Lock
from smolbuild.model.oci import encode_json
from smolbuild.store.artifact import Artifact
from smolbuild.trust.statement import (
    Builder,
    Provenance,
    Resource,
    Statement,
    provenance_statement,
    result_statement,
)

__all__ = ["BUILD_TYPE", "attest_proof", "attest_provenance"]

BUILD_TYPE = "https://smolbuild.example.com/provenance/v1"
_LOCAL_BUILDER = "https://smolbuild.example.com/builders/local"
_BUILDER = "SMOLBUILD_BUILDER_ID"
_MOST_FILES = 1000
"""More declared files than this are one dependency: a statement has at most 4 MiB."""


def attest_proof(artifact: Artifact, proofs: Sequence[Proof]) -> Statement:
    """Return the test result: health check and restored forks, and what they were tested with."""
    config = artifact.config
    probes = {"services": encode(config.services), "health": encode(config.health)}
    specification = digest_bytes(encode_json(probes))
    return result_statement(
        artifact.manifest.descriptor.digest,
        result="PASSED",
        configuration=[Resource(name="probes", digest={"sha256": hex_of(specification)})],
        passed=[
            *(["health"] if config.health is not None else []),
            *(f"restore-proof fork {n}: {p.ready_ms} ms" for n, p in enumerate(proofs, 1)),
        ],
    )


def attest_provenance(
    plan: Plan,
    artifact: Artifact,
    *,
    started: float,
    finished: float,
    environment: Mapping[str, str],
) -> Statement:
    """Return how ``artifact`` was made of ``plan``; times in seconds since 1970.

    ``SMOLBUILD_BUILDER_ID`` in ``environment`` names who builds: a URI per trust domain, for a
    laptop is not the CI.
    """
    config, smolfile = artifact.config, plan.smolfile
    external: dict[str, Json] = {
        "smolfile": dict(smolfile.sources),
        "name": plan.name,
        "key": plan.key,
        "architecture": config.contract.architecture,
        "secrets": sorted({name for step in smolfile.steps for name in step.secrets}),
    }
    internal: dict[str, Json] = {
        "shape": encode(config.shape),
        "contract": encode(config.contract),
        "network": encode(config.network),
        "policy": encode(smolfile.policy),
    }
    made = Provenance(
        build_type=BUILD_TYPE,
        external_parameters=external,
        internal_parameters=internal,
        resolved_dependencies=tuple(_dependencies(plan)),
        builder=Builder(
            id=environment.get(_BUILDER) or _LOCAL_BUILDER, version={"smolbuild": __version__}
        ),
        invocation_id=os.urandom(16).hex(),
        started_on=_time(started),
        finished_on=_time(finished),
        byproducts=tuple(_egress(config.results.egress)),
    )
    return provenance_statement(artifact.manifest.descriptor.digest, made)


def _dependencies(plan: Plan) -> Iterator[Resource]:
    image = plan.lock.lock.image
    reference = "" if image is None or plan.local_base else image.reference
    yield Resource(name="base", uri=reference, digest=_sha256(plan.base_digest))
    yield from _packages(plan.lock.lock)
    yield Resource(name="kernel", digest=_sha256(plan.kernel_digest))
    files = [entry for entry in plan.files.entries() if entry.digest is not None]
    if len(files) > _MOST_FILES:
        listed = [[entry.path, entry.digest] for entry in files]
        digest = digest_bytes(canonical_json(listed))
        note: dict[str, Json] = {"files": len(files)}
        yield Resource(name="declared files", digest=_sha256(digest), annotations=note)
        return
    for entry in files:
        if entry.digest is not None:
            yield Resource(name=entry.path, digest=_sha256(entry.digest))


def _packages(lock: Lock) -> Iterator[Resource]:
    if lock.debian is not None:
        for package in lock.debian.packages:
            yield Resource(
                uri=_deb(package.name, package.version, package.architecture),
                digest={"sha256": package.sha256},
            )
    if lock.kernel is not None:
        kernel = lock.kernel  # of the builder's own distribution, whichever that is
        yield Resource(name=f"{kernel.package} {kernel.version}", digest={"sha256": kernel.sha256})


def _deb(name: str, version: str, architecture: str) -> str:
    """Return the package URL (purl-spec, type ``deb``)."""
    return f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}"


def _egress(account: Sequence[StepEgress]) -> Iterator[Resource]:
    for step in dict.fromkeys(record.step for record in account):
        requests = [encode(record) for record in account if record.step == step]
        digest = digest_bytes(canonical_json(requests))
        notes: dict[str, Json] = {"step": step, "requests": requests}
        yield Resource(name="egress", digest=_sha256(digest), annotations=notes)


def _sha256(digest: Digest) -> dict[str, str]:
    return {"sha256": hex_of(digest)}


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
