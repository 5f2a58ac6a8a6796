"""``smolbuild build``: from a plan to a proven, signed, named artifact."""

import contextlib
import dataclasses
import datetime as dt
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from smolbuild import __version__
from smolbuild.build.attest import attest_proof, attest_provenance
from smolbuild.build.base_info import base_info, kernel_version
from smolbuild.build.cache import StepCache
from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.dockerfile import with_image
from smolbuild.build.evict import evict
from smolbuild.build.freeze import SERVICES, Frozen, freeze, service_run
from smolbuild.build.gate import prove_restore
from smolbuild.build.keep import StepRun
from smolbuild.build.kept import Failed, offered
from smolbuild.build.line_notes import note_lines
from smolbuild.build.pack import (
    Delta,
    Overlay,
    encode_agent_cursor,
    pack_artifact,
    pack_streams,
    shipped_deltas,
)
from smolbuild.build.plan import Plan
from smolbuild.build.remote import RemoteCache, pull_remote
from smolbuild.build.residue import ResidueGate
from smolbuild.build.result import BuildResult, reuse
from smolbuild.build.resume import Parts, set_up_machine
from smolbuild.build.secrets import Secrets
from smolbuild.build.sign import sign_artifact
from smolbuild.build.steps import step_run
from smolbuild.core.digest import hex_of
from smolbuild.core.errors import BuildError
from smolbuild.core.events import Emit, Message
from smolbuild.core.files import file_lock, require_space, try_lock
from smolbuild.guest.compile import build_agent
from smolbuild.guest.initramfs import build_initramfs
from smolbuild.guest.kernel import kernel_digest
from smolbuild.machine.base import Machine
from smolbuild.machine.rundir import RunDirectory
from smolbuild.model.artifact import (
    FORMAT_VERSION,
    ArtifactConfig,
    encode_config,
)
from smolbuild.model.egress import StepEgress
from smolbuild.model.smolfile import Step
from smolbuild.source.base_disk import prepare_base
from smolbuild.source.kernel import kernel_from_path, prepare_kernel
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import key_name, last_name
from smolbuild.store.materialise import materialising
from smolbuild.trust.keys import Signer

__all__ = ["build"]

_BUILD_LOCK_SECONDS = 4 * 3600.0
_SPACE_MARGIN = 1 << 30
_SCRUB = "scrub"
"""Name of the delta that hides what was deleted."""


def build(
    context: BuildContext,
    plan: Plan,
    signer: Signer,
    names: Sequence[str],
    phases: Phases,
    *,
    no_cache: bool = False,
    remote: RemoteCache | None = None,
) -> BuildResult:
    """Build ``plan``; see ``result.reuse`` for what need not be built.

    Two builds of one key wait for each other and share the result. Nothing is named or signed
    before the restore proof passed; a failed build leaves the step cache and every old name.

    Args:
        context: the world.
        plan: what to build.
        signer: signs the result.
        names: local names for the result.
        phases: receives the phases' times.
        no_cache: run every step and build anew, whatever is there.
        remote: where to look before building.

    Raises:
        SmolbuildError: every class of it; see each part.

    """
    lock = context.home.locks / f"build-{hex_of(plan.key)}"
    with try_lock(lock) as free:
        if not free:
            context.emit(
                Message(level="info", text="another smolbuild builds this key: waiting for it")
            )
    with file_lock(lock, timeout=_BUILD_LOCK_SECONDS, what="the build of this key", interval=0.2):
        done = None if no_cache else reuse(context, plan, names)
        if done is not None:  # somebody else has just built it
            return done
        if remote is not None and not no_cache:
            done = pull_remote(context, plan, remote, names, phases)
            if done is not None:
                return done
        possible = with_image(context, plan)
        if possible is plan:
            with (
                Secrets.of_smolfile(plan.smolfile, context.environment) as secrets,
                secrets.masked_errors(),
            ):
                masked = dataclasses.replace(context, emit=secrets.masked(context.emit))
                return _build(masked, plan, signer, names, phases, secrets, no_cache=no_cache)
    result = build(context, possible, signer, names, phases, no_cache=no_cache, remote=remote)
    return dataclasses.replace(result, plan=result.plan or possible)


def _build(
    context: BuildContext,
    plan: Plan,
    signer: Signer,
    names: Sequence[str],
    phases: Phases,
    secrets: Secrets,
    *,
    no_cache: bool,
) -> BuildResult:
    started = context.now()
    work = RunDirectory.create(context.home)
    # From the first packed blob on, until a name leads to it, `rm` must not collect it.
    packed = contextlib.ExitStack()
    try:
        cache = packed.enter_context(_step_cache(context, plan))
        if no_cache:
            cache.forget(plan.chain)
        parts = _prepare(context, plan, work.path, phases)
        require_space(
            context.home.root,
            (plan.shape.memory_mib << 20) * 2 + _SPACE_MARGIN,
            what="building the artifact",
        )
        residue = ResidueGate(context.home.cache, plan.smolfile, secrets)
        offer = functools.partial(_offered, context, plan, parts)
        machine, links = set_up_machine(
            context, plan, parts, cache, secrets, residue, work.path, phases, offer=offer
        )
        try:
            with offer(machine, None):
                frozen = freeze(context, plan, machine, links, secrets, work.path, phases)
            links = frozen.links
            deltas = _shipped(plan, links, frozen)
            with phases.phase("residue", "searching for secrets, keys and tokens"):
                residue.check(parts.base.path, parts.base.digest, deltas, frozen.checkpoint)
            packed.enter_context(context.store.lease())
            _settle(cache, context.emit)
            with phases.phase("pack", "packing disk and memory"):
                artifact = _pack(context, plan, parts, links, frozen, deltas, residue)
        finally:
            machine.discard()
        with (
            phases.phase("proof", "restoring two forks from the packed bytes"),
            materialising(
                context.store, artifact, context.home.materialised, emit=context.emit
            ) as files,
        ):
            proofs = prove_restore(context.engine, files, artifact.config, now=context.now)
        with phases.phase("sign", "signing"):
            now = context.now()
            attested = (
                attest_proof(artifact, proofs),
                attest_provenance(
                    plan, artifact, started=started, finished=now, environment=context.environment
                ),
            )
            sign_artifact(context.store, artifact, signer, attested, now=now)
            context.store.name(
                artifact.index.descriptor, key_name(plan.key), last_name(plan.name), *names
            )
            note_lines(context.home.cache, plan.key, plan.files)
    finally:
        packed.close()
        work.remove()
    return BuildResult(
        artifact=artifact,
        names=tuple(names),
        origin="built",
        proofs=proofs,
    )


@contextlib.contextmanager
def _step_cache(context: BuildContext, plan: Plan) -> Iterator[StepCache]:
    """Give the step cache; afterwards it is brought back to the size that the Smolfile allows."""
    try:
        with StepCache(context.home.cache) as cache:
            try:
                yield cache
            finally:
                _settle(cache, context.emit)
    finally:
        evict(context.home.cache, max_bytes=plan.smolfile.cache.max_size)


def _settle(cache: StepCache, emit: Emit) -> None:
    try:
        cache.settle()
    except OSError as error:
        text = f"not every step could be kept in the cache: {error.strerror}"
        emit(Message(level="warning", text=text))


def _prepare(context: BuildContext, plan: Plan, work: Path, phases: Phases) -> Parts:
    with phases.phase("base", "preparing kernel and root disk"):
        given = plan.smolfile.kernel_path
        kernel = (
            prepare_kernel(context.home.cache, locked=plan.lock.lock.kernel, emit=context.emit)
            if given is None
            else kernel_from_path(given)
        )
        initrd = work / "initrd"
        build_initramfs(kernel, build_agent(context.home.cache), initrd)
        base = prepare_base(
            plan.smolfile,
            plan.lock.lock,
            cache=context.home.cache,
            fetcher=context.fetcher,
            docker=context.docker,
            emit=context.emit,
        )
    unharmed = kernel_digest(kernel.vmlinuz, kernel.modules) == kernel.content
    if kernel.digest != plan.kernel_digest or not unharmed:
        raise BuildError(
            f"the kernel {kernel.vmlinuz} changed since the plan",
            hint="build again when nothing writes to it any more",
            code="kernel-changed",
        )
    if base.image_digest != plan.base_digest:
        raise BuildError(
            f"the base changed since the plan: {plan.base_digest} became {base.image_digest}",
            hint="build again",
            code="base-changed",
        )
    return Parts(
        base=base,
        kernel=kernel.vmlinuz,
        initrd=initrd,
    )


def _offered(
    context: BuildContext, plan: Plan, parts: Parts, machine: Machine, step: Step | None
) -> contextlib.AbstractContextManager[None]:
    """Offer the machine to who wants to look at it when the block, of a step or none, fails."""
    network = plan.smolfile.network if step is None else plan.smolfile.network_of(step)
    run = service_run(plan) if step is None else step_run(plan.run, plan.smolfile, step)
    describe = functools.partial(
        Failed,
        name=plan.name,
        what=f"step {step.name}" if step else "the services and their health",
        command=step.run if step else "",
        kernel=parts.kernel,
        initrd=parts.initrd,
        shape=plan.shape,
        run=run,
        network=network,
        within=plan.smolfile.network,
        guarded=any(each.secrets for each in plan.smolfile.steps),
    )
    return offered(machine, context.on_failure, lambda error: describe(error=error))


def _egress(links: Sequence[StepRun], frozen: Frozen) -> tuple[StepEgress, ...]:
    seen = [(link.name, record) for link in links for record in link.egress]
    seen += [(SERVICES, record) for record in frozen.egress]
    return tuple(
        StepEgress(step=step, **{f.name: getattr(r, f.name) for f in dataclasses.fields(r)})
        for step, r in seen
    )


def _shipped(plan: Plan, links: Sequence[StepRun], frozen: Frozen) -> tuple[Delta, ...]:
    last = SERVICES if plan.smolfile.scrub.run is None else _SCRUB
    overlays = [
        Overlay(
            step=link.name,
            path=link.overlay,
            note=None if link.entry is None else link.entry.packed,
        )
        for link in links
    ]
    overlays.append(Overlay(step=last, path=frozen.checkpoint.disk_overlay))
    return shipped_deltas(overlays, only_seen=plan.smolfile.guarded)


def _pack(
    context: BuildContext,
    plan: Plan,
    parts: Parts,
    links: Sequence[StepRun],
    frozen: Frozen,
    deltas: Sequence[Delta],
    residue: ResidueGate,
) -> Artifact:
    checkpoint = frozen.checkpoint
    streams = pack_streams(
        context.store,
        base=parts.base.path,
        base_digest=parts.base.digest,
        deltas=deltas,
        checkpoint=checkpoint,
        kernel=parts.kernel,
        initrd=parts.initrd,
        cache=context.home.cache,
        emit=context.emit,
    )
    created = dt.datetime.fromtimestamp(context.now(), dt.UTC)
    config = ArtifactConfig(
        format_version=FORMAT_VERSION,
        name=plan.name,
        key=plan.key,
        key_tree=plan.tree.to_json(),
        created=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        os="linux",
        shape=plan.shape,
        contract=checkpoint.contract,
        agent_cursor=encode_agent_cursor(checkpoint.agent_cursor),
        disk=streams.disk,
        memory=streams.memory,
        device_state=streams.device_state,
        kernel=streams.kernel,
        initrd=streams.initrd,
        run=service_run(plan),
        network=plan.smolfile.network,
        services=tuple(dataclasses.replace(service, line=0, key="") for service in frozen.services),
        health=plan.smolfile.health,
        restore=plan.smolfile.restore,
        results=dataclasses.replace(frozen.results, egress=_egress(links, frozen)),
        base=base_info(plan.smolfile, plan.lock.lock, plan.base_digest),
        kernel_version=kernel_version(plan.lock.lock),
        builder_version=__version__,
    )
    residue.check_text(encode_config(config), "the artifact's configuration")
    return pack_artifact(context.store, config, streams.layers)
