"""What a build would do: key, every input with its digest, which steps run and why."""

from pathlib import Path
from typing import TYPE_CHECKING

from smolbuild.build.age import Age, age_of, oldest_delta
from smolbuild.build.cache import StepCache
from smolbuild.build.context import BuildContext
from smolbuild.build.files import collect_files
from smolbuild.build.lockfile import LockState, follow_base, obtain_lock
from smolbuild.build.run_config import run_config, services_of
from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.core.values import dataclass
from smolbuild.guest.agent_source import agent_digest
from smolbuild.guest.initramfs import initramfs_key
from smolbuild.model.artifact import RunConfig
from smolbuild.model.contract import Shape
from smolbuild.model.declared import DeclaredFiles
from smolbuild.model.key import KeyInputs, build_key_tree, provenance_key, step_chain
from smolbuild.model.keytree import Change, KeyTree, diff_trees, tree_from_json
from smolbuild.model.parse import parse_smolfile
from smolbuild.model.reference import artifact_name
from smolbuild.model.smolfile import Service, Smolfile
from smolbuild.source.base_identity import base_identity, has_local_base
from smolbuild.source.kernel import kernel_identity
from smolbuild.store.artifact import Artifact, find_whole, load_artifact
from smolbuild.store.layout import last_name

if TYPE_CHECKING:
    from smolbuild.build.drift import Drift

__all__ = ["Plan", "PlannedStep", "make_plan", "planned_steps"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is decided before anything is built."""

    smolfile: Smolfile
    name: str
    """Name of the artifact, without a tag."""
    lock: LockState
    files: DeclaredFiles
    local_base: bool
    """Whether the base is an image on this host, which no lock pins."""
    base_digest: Digest
    kernel_digest: Digest
    tree: KeyTree
    key: Digest
    chain: tuple[Digest, ...]
    """Keys of the disk after the copies and after each step."""
    run: RunConfig
    services: tuple[Service, ...]
    implied_main: bool
    """Whether the only service is the image's own command, which nobody asked for by name."""
    shape: Shape
    existing: Artifact | None
    """The local artifact that has this key already, and is not too old."""
    age: Age | None
    """Of the local artifact of this key, also of one that is too old; None: there is none."""
    oldest_delta: float
    """Seconds since 1970: a step's cached disk from before is too old to be used."""
    drift: "Drift | None"
    """What is known of the base's drift; None: nobody asked."""
    changes: tuple[Change, ...] | None
    """Against the last build of this name; None when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """Whether a step would run, and why."""

    name: str
    chain_key: Digest
    cached: bool
    reason: str


def make_plan(
    context: BuildContext,
    path: Path,
    *,
    locked: bool = False,
    check_drift: bool = False,
) -> Plan:
    """Parse the Smolfile in ``path``, resolve every input and compute the key. Starts no machine.

    The lock is written when it is missing or does not fit, unless ``locked``. ``check_drift`` asks
    now whether the base drifted (see ``drift.heed_drift``).

    Raises:
        SmolfileError: the Smolfile is wrong; every problem at once.
        UsageError: ``locked`` and the lock does not fit, or something is asked that cannot be.
        BuildError, HostError, RegistryError: an input is missing or cannot be resolved.

    """
    smolfile = parse_smolfile(path, environment=context.environment)
    _refuse_half_networks(smolfile)
    files = collect_files(smolfile.path.parent, smolfile, cache=context.home.cache)
    lock = obtain_lock(context, smolfile, locked=locked)
    lock, drift = _drift(context, smolfile, lock, locked=locked, force=check_drift)
    base = base_identity(smolfile, lock.lock, cache=context.home.cache, fetcher=context.fetcher)
    lock = follow_base(context, smolfile, lock, base.digest, locked=locked)
    kernel = kernel_identity(smolfile.kernel_path, lock.lock.kernel)
    inputs = KeyInputs(
        base=base.digest,
        kernel=kernel,
        initramfs=initramfs_key(kernel),
        agent=agent_digest(),
        contract=context.contract(),
        smolfile=smolfile,
        files=files,
    )
    tree = build_key_tree(inputs)
    key = provenance_key(tree)
    found = find_whole(context.store, key)
    age = None if found is None else age_of(found.config, smolfile.policy, now=context.now())
    existing = None if age is not None and age.is_over else found
    run = run_config(smolfile, base.config)
    name = smolfile.name or artifact_name(smolfile.path.parent.name)
    return Plan(
        smolfile=smolfile,
        name=name,
        lock=lock,
        files=files,
        local_base=has_local_base(smolfile),
        base_digest=base.digest,
        kernel_digest=kernel,
        tree=tree,
        key=key,
        chain=step_chain(inputs),
        run=run,
        services=services_of(smolfile, run),
        implied_main=not smolfile.services and (smolfile.entrypoint, smolfile.cmd) == (None, None),
        shape=Shape(
            cpus=smolfile.cpus,
            memory_mib=smolfile.memory,
            disk_bytes=smolfile.overlay * _GIB,
            network="full" if smolfile.network.mode == "full" else "none",
        ),
        existing=existing,
        age=age,
        oldest_delta=oldest_delta(smolfile.policy, now=context.now()),
        drift=drift,
        changes=() if existing is not None else _changes(context, name, tree),
    )


def planned_steps(plan: Plan, cache: StepCache) -> tuple[PlannedStep, ...]:
    """Return each step with whether it would run, and why."""
    cached = len(cache.prefix(plan.chain, since=plan.oldest_delta))
    first_name = "" if cached >= len(plan.chain) else _link_name(plan, cached)
    steps = []
    for link, step in enumerate(plan.smolfile.steps, 1):
        is_cached = plan.existing is not None or link < cached
        if plan.existing is not None:
            reason = "the whole artifact is there"
        elif is_cached:
            reason = "its disk is cached"
        elif plan.age is not None and not plan.changes:
            reason = f"the artifact is too old: {plan.age}"
        elif link > cached and plan.changes is not None:
            reason = f"{first_name} runs before it"
        else:
            reason = _why(plan, step.name)
        steps.append(
            PlannedStep(name=step.name, chain_key=plan.chain[link], cached=is_cached, reason=reason)
        )
    return tuple(steps)


def _link_name(plan: Plan, link: int) -> str:
    return "the copy" if link == 0 else f"step {plan.smolfile.steps[link - 1].name}"


def _why(plan: Plan, step: str) -> str:
    if plan.changes is None:
        return "not built before"
    own = [change.text for change in plan.changes if change.leaf == f"step {step}"]
    texts = own or [change.text for change in plan.changes]
    return "; ".join(texts[:5]) or "its cached disk is gone"


def _changes(context: BuildContext, name: str, tree: KeyTree) -> tuple[Change, ...] | None:
    last = context.store.find(last_name(name))
    if last is None:
        return None
    try:
        old = tree_from_json(load_artifact(context.store, last).config.key_tree)
    except VerificationError:
        return None
    return diff_trees(old, tree)


def _drift(
    context: BuildContext, smolfile: Smolfile, lock: LockState, *, locked: bool, force: bool
) -> "tuple[LockState, Drift | None]":
    if smolfile.policy.on_base_drift is None and not force:
        return lock, None  # the common case
    from smolbuild.build.drift import heed_drift

    return heed_drift(context, smolfile, lock, locked=locked, force=force)


def _refuse_half_networks(smolfile: Smolfile) -> None:
    for step in smolfile.steps:
        if isinstance(step.network, tuple) and smolfile.network.mode == "full":
            raise UsageError(
                f"step {step.name} names hosts to reach, but in a machine with a full network "
                "nothing can be held to a list",
                hint="put the hosts into network.allow_hosts and leave out `net = true`",
                code="network-list",
            )
