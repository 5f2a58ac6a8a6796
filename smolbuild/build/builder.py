"""``smolbuild build``: from a plan to a proven, signed, named artifact."""

import contextlib
import dataclasses
import datetime as dt
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smolbuild import __version__
from smolbuild.build.attest import attest_proof, attest_provenance
from smolbuild.build.base_info import base_info, kernel_version
from smolbuild.build.cache import CachedDelta, StepCache, lineage_of
from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.dockerfile import with_image
from smolbuild.build.gate import prove_restore
from smolbuild.build.kept import Failed, offered
from smolbuild.build.line_notes import note_lines
from smolbuild.build.pack import (
    Delta,
    encode_agent_cursor,
    pack_artifact,
    pack_streams,
    shipped_deltas,
)
from smolbuild.build.plan import Plan
from smolbuild.build.remote import RemoteCache, pull_remote
from smolbuild.build.residue import ResidueGate
from smolbuild.build.result import BuildResult, reuse
from smolbuild.build.scrub import scrub
from smolbuild.build.secrets import Secrets
from smolbuild.build.sign import sign_artifact
from smolbuild.build.steps import COPY_STEP, StepRun, run_steps
from smolbuild.build.undeclared import heed_denied
from smolbuild.core.digest import hex_of
from smolbuild.core.errors import BuildError, HealthError
from smolbuild.core.events import Message, StepStarted
from smolbuild.core.files import file_lock, require_space, try_lock
from smolbuild.core.text import counted
from smolbuild.guest.compile import build_agent
from smolbuild.guest.initramfs import build_initramfs
from smolbuild.guest.kernel import kernel_digest
from smolbuild.machine.base import BootSpec, Checkpoint, Disk, Machine
from smolbuild.machine.health import (
    await_ready,
    check_health,
    check_still_ready,
    hint_for_ended,
    start_service,
    tail,
)
from smolbuild.machine.network import let_through, proxy_env
from smolbuild.machine.rundir import RunDirectory
from smolbuild.model.artifact import (
    FORMAT_VERSION,
    ArtifactConfig,
    Results,
    RunConfig,
    encode_config,
)
from smolbuild.model.contract import Shape
from smolbuild.model.egress import EgressRecord, StepEgress
from smolbuild.model.environment import merge_env
from smolbuild.model.smolfile import Service, Step
from smolbuild.source.base_disk import BaseDisk, prepare_base
from smolbuild.source.kernel import kernel_from_path, prepare_kernel
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import key_name, last_name
from smolbuild.store.materialise import materialising
from smolbuild.trust.keys import Signer

__all__ = ["build"]

_BUILD_LOCK_SECONDS = 4 * 3600.0
_BOOT_SECONDS = 180.0
_SPACE_MARGIN = 1 << 30
_SERVICES = "services"
"""Name of the delta and of the egress that services and health check leave."""
_SCRUB = "scrub"
"""Name of the delta that hides what was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The prepared inputs of a machine."""

    base: BaseDisk
    kernel: Path
    initrd: Path
    shape: Shape


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
    cache = StepCache(context.home.cache)
    if no_cache:
        cache.forget(plan.chain)
    work = RunDirectory.create(context.home)
    # From the first packed blob on, until a name leads to it, `rm` must not collect it.
    packed = contextlib.ExitStack()
    try:
        parts = _prepare(context, plan, work.path, phases)
        require_space(
            context.home.root,
            (parts.shape.memory_mib << 20) * 2 + _SPACE_MARGIN,
            what="building the artifact",
        )
        residue = ResidueGate(context.home.cache, plan.smolfile, secrets)
        machine, links = _set_up(context, plan, parts, cache, secrets, residue, work.path, phases)
        try:
            with _offered(context, plan, parts, machine, None):
                frozen = _freeze(context, plan, machine, links, secrets, work.path, phases)
            deltas = _shipped(plan, links, frozen)
            with phases.phase("residue", "searching for secrets, keys and tokens"):
                residue.check(parts.base.path, parts.base.digest, deltas, frozen.checkpoint)
            packed.enter_context(context.store.lease())
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


def _prepare(context: BuildContext, plan: Plan, work: Path, phases: Phases) -> _Parts:
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
    return _Parts(
        base=base,
        kernel=kernel.vmlinuz,
        initrd=initrd,
        shape=plan.shape,
    )


def _set_up(
    context: BuildContext,
    plan: Plan,
    parts: _Parts,
    cache: StepCache,
    secrets: Secrets,
    residue: ResidueGate,
    work: Path,
    phases: Phases,
) -> tuple[Machine, list[StepRun]]:
    """Boot from the longest cached prefix, run the rest; return the machine and all links."""
    cached = _borrow(cache, plan, parts, work)
    first = len(cached)
    link_names = (COPY_STEP, *(step.name for step in plan.smolfile.steps))
    links = [
        StepRun(name=link_names[n], overlay=delta.path, egress=delta.egress)
        for n, delta in enumerate(cached)
    ]
    for number in range(1, first):
        link = links[number]
        heed_denied(link.name, link.egress, plan.smolfile.policy, context.emit)
        context.emit(
            StepStarted(
                name=link_names[number], number=number, total=len(plan.chain) - 1, cached=True
            )
        )
    with phases.phase("boot", "booting"):
        machine = context.engine.boot(
            BootSpec(
                kernel=parts.kernel,
                initrd=parts.initrd,
                disk=Disk(base=parts.base.path, overlays=tuple(delta.path for delta in cached)),
                shape=parts.shape,
                zero_freed=plan.smolfile.guarded,
            ),
            timeout=_BOOT_SECONDS,
        )
    try:
        to_run = counted(len(plan.chain) - max(first, 1), "step")
        with phases.phase("steps", f"{to_run} to run", when=first < len(plan.chain)):
            links += run_steps(
                machine,
                plan.smolfile,
                plan.run,
                plan.files,
                plan.chain,
                first=first,
                below=cached[-1].token if cached else lineage_of(parts.base.digest),
                cache=cache,
                secrets=secrets,
                residue=residue,
                emit=context.emit,
                authorities=plan.authorities,
                offer=functools.partial(_offered, context, plan, parts, machine),
            )
    except BaseException:
        machine.discard()
        raise
    return machine, links


def _offered(
    context: BuildContext, plan: Plan, parts: _Parts, machine: Machine, step: Step | None
) -> contextlib.AbstractContextManager[None]:
    """Offer the machine to who wants to look at it when the block, of a step or none, fails."""
    network = plan.smolfile.network if step is None else plan.smolfile.network_of(step)
    run = _service_run(plan)
    if step is not None:
        env = merge_env(plan.run.env, step.env, proxy_env(network))
        workdir = step.workdir or run.workdir
        run = dataclasses.replace(run, env=env, workdir=workdir, user=step.user or "root")
    describe = functools.partial(
        Failed,
        name=plan.name,
        what=f"step {step.name}" if step else "the services and their health",
        command=step.run if step else "",
        kernel=parts.kernel,
        initrd=parts.initrd,
        shape=parts.shape,
        run=run,
        network=network,
        within=plan.smolfile.network,
        guarded=any(each.secrets for each in plan.smolfile.steps),
    )
    return offered(machine, context.on_failure, lambda error: describe(error=error))


def _borrow(cache: StepCache, plan: Plan, parts: _Parts, work: Path) -> list[CachedDelta]:
    """Link the cached deltas into ``work``, where no ``--no-cache`` build takes them away."""
    borrowed: list[CachedDelta] = []
    for number, delta in enumerate(
        cache.prefix(plan.chain, parts.base.digest, since=plan.oldest_delta)
    ):
        path = work / f"cached-{number}.qcow2"
        try:
            os.link(delta.path, path)
        except FileNotFoundError:
            break  # taken away just now: from here on the steps run
        borrowed.append(dataclasses.replace(delta, path=path))
    return borrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frozen:
    """A saved machine: what was seen before, and the services that are alive in it."""

    checkpoint: Checkpoint
    results: Results
    egress: tuple[EgressRecord, ...]
    """Of the services and the health check."""
    services: tuple[Service, ...]


def _freeze(
    context: BuildContext,
    plan: Plan,
    machine: Machine,
    links: list[StepRun],
    secrets: Secrets,
    work: Path,
    phases: Phases,
) -> _Frozen:
    """Start the services, wait for health, scrub, probe once more and save the machine.

    Scrubbing adds a link: what services and commands wrote until then.
    """
    run = _service_run(plan)
    let_through(machine, plan.smolfile.network, within=plan.smolfile.network)
    ready = {}
    starting = f"starting {counted(len(plan.services), 'service')}"
    with phases.phase("ready", starting, when=bool(plan.services)):
        for service in plan.services:
            start_service(machine, service, run)
            if not plan.implied_main:
                ready[service.name] = await_ready(machine, service, run)
    report = None
    health = plan.smolfile.health
    if health is not None:
        with phases.phase("health", "health check"):
            report = check_health(machine, health, run, plan.services)
    commands = plan.smolfile.scrub.run
    if commands is not None:
        with phases.phase("scrub", "cleaning, and zeroing what is free"):
            overlays = [link.overlay for link in links]
            finished = scrub(machine, commands, run, overlays, secrets, context.emit)
            links.append(StepRun(name=_SERVICES, overlay=finished))
    with phases.phase("checkpoint", "checkpoint"):
        # Whoever was healthy may have died since; what is frozen must be alive (once, no retries).
        services = _probe_again(context, plan, machine, run)
        survey = machine.survey()
        checkpoint = machine.checkpoint(work)
    egress = secrets.mask_records(machine.egress_records())
    heed_denied(_SERVICES, egress, plan.smolfile.policy, context.emit)
    return _Frozen(
        checkpoint=checkpoint,
        results=Results(
            health=report.detail if report else "",
            ready_ms=ready,
            processes=secrets.mask_processes(survey.processes),
            ports=survey.ports,
        ),
        egress=egress,
        services=services,
    )


def _probe_again(
    context: BuildContext, plan: Plan, machine: Machine, run: RunConfig
) -> tuple[Service, ...]:
    """Return the services that are alive; one that ended is an error, but for an image's shell."""
    alive = []
    for service in plan.services:
        ended = machine.service_status(f"service:{service.name}")
        if ended is None:
            check_still_ready(machine, service, run)
            alive.append(service)
        elif plan.implied_main and ended.status == 0:
            # The CMD of many images is a shell, which ends at once when nobody types.
            text = f"the image's command ({service.run}) has ended: it is not in the checkpoint"
            context.emit(Message(level="info", text=text))
        else:
            raise HealthError(
                f"service {service.name} ended with status {ended.status} before the checkpoint",
                hint=hint_for_ended(ended.status),
                code="service-ended",
                details=tail(machine.service_output(f"service:{service.name}")),
            )
    health = plan.smolfile.health
    if health is not None:
        once = dataclasses.replace(health, retries=1, startup_grace=0.0)
        check_health(machine, once, run, plan.services)
    return tuple(alive)


def _egress(links: Sequence[StepRun], frozen: _Frozen) -> tuple[StepEgress, ...]:
    seen = [(link.name, record) for link in links for record in link.egress]
    seen += [(_SERVICES, record) for record in frozen.egress]
    return tuple(
        StepEgress(step=step, **{f.name: getattr(r, f.name) for f in dataclasses.fields(r)})
        for step, r in seen
    )


def _service_run(plan: Plan) -> RunConfig:
    env = merge_env(plan.run.env, proxy_env(plan.smolfile.network))
    return dataclasses.replace(plan.run, env=env)


def _shipped(plan: Plan, links: Sequence[StepRun], frozen: _Frozen) -> tuple[Delta, ...]:
    last = _SERVICES if plan.smolfile.scrub.run is None else _SCRUB
    overlays = [(link.name, link.overlay) for link in links]
    overlays.append((last, frozen.checkpoint.disk_overlay))
    return shipped_deltas(overlays, only_seen=plan.smolfile.guarded)


def _pack(
    context: BuildContext,
    plan: Plan,
    parts: _Parts,
    links: Sequence[StepRun],
    frozen: _Frozen,
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
        shape=parts.shape,
        contract=checkpoint.contract,
        agent_cursor=encode_agent_cursor(checkpoint.agent_cursor),
        disk=streams.disk,
        memory=streams.memory,
        device_state=streams.device_state,
        kernel=streams.kernel,
        initrd=streams.initrd,
        run=_service_run(plan),
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
