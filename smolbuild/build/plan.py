"""What a build would do: key, every input with its digest, and what changed."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smolbuild.build.age import Age, age_of, oldest_delta
from smolbuild.build.context import BuildContext
from smolbuild.build.files import collect_files
from smolbuild.build.lockfile import LockState, follow_base, follow_dockerfile, obtain_lock
from smolbuild.build.run_config import run_config, services_of
from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.core.values import dataclass
from smolbuild.guest.agent_source import agent_digest
from smolbuild.guest.initramfs import initramfs_key
from smolbuild.model.artifact import RunConfig
from smolbuild.model.contract import Shape
from smolbuild.model.declared import DeclaredFiles
from smolbuild.model.environment import merge_env
from smolbuild.model.key import KeyInputs, build_key_tree, provenance_key, step_chain
from smolbuild.model.keytree import Change, KeyTree
from smolbuild.model.lock import Lock
from smolbuild.model.parse import parse_smolfile
from smolbuild.model.reference import artifact_name
from smolbuild.model.smolfile import Service, Smolfile
from smolbuild.source.base_identity import base_identity, has_local_base
from smolbuild.source.kernel import kernel_identity
from smolbuild.store.artifact import Artifact, find_whole, load_artifact
from smolbuild.store.layout import last_name

if TYPE_CHECKING:
    from smolbuild.build.authorities import Authority
    from smolbuild.build.drift import Drift

__all__ = ["Plan", "make_plan"]

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
    authorities: "tuple[Authority, ...]"
    """What the guest trusts besides its own certificates."""
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
    compared: Digest | None
    """The artifact whose inputs are compared with these; None: there is none, or no need to."""
    changes: tuple[Change, ...] | None
    """Since the compared artifact; None when there is none to compare with."""
    locked: bool = False
    """Whether the lock may not be renewed."""


def make_plan(
    context: BuildContext,
    path: Path,
    *,
    locked: bool = False,
    check_drift: bool = False,
    against: str | None = None,
) -> Plan:
    """Parse the Smolfile in ``path``, resolve every input and compute the key. Starts no machine.

    The lock is written when it is missing or does not fit, unless ``locked``.

    Args:
        context: the world.
        path: the Smolfile.
        locked: demand that the lock exists and fits.
        check_drift: ask now whether the base drifted (see ``drift.heed_drift``).
        against: the local artifact to compare with (see ``Store.resolve``); None: the last build
            of this name, and none when the artifact is there already.

    Raises:
        SmolfileError: the Smolfile is wrong; every problem at once.
        UsageError: ``locked`` and the lock does not fit, something is asked that cannot be, or
            nothing is ``against``.
        BuildError, HostError, RegistryError: an input is missing or cannot be resolved.

    """
    smolfile = parse_smolfile(path, environment=context.environment)
    _refuse_half_networks(smolfile)
    files = collect_files(smolfile.path.parent, smolfile, cache=context.home.cache)
    authorities, trust_env = _authorities(smolfile)
    lock = obtain_lock(context, smolfile, locked=locked)
    lock, drift = _drift(context, smolfile, lock, locked=locked, force=check_drift)
    lock = follow_dockerfile(context, smolfile, lock, locked=locked)
    base = base_identity(
        smolfile,
        lock.lock,
        cache=context.home.cache,
        fetcher=context.fetcher,
        docker=context.docker,
    )
    lock = follow_base(context, smolfile, lock, base, locked=locked)
    kernel = kernel_identity(smolfile.kernel_path, lock.lock.kernel)
    inputs = KeyInputs(
        base=base.digest,
        kernel=kernel,
        initramfs=initramfs_key(kernel),
        agent=agent_digest(),
        contract=context.contract(),
        smolfile=smolfile,
        files=files,
        authorities=tuple(one.digest for one in authorities),
    )
    tree = build_key_tree(inputs)
    key = provenance_key(tree)
    found = find_whole(context.store, key)
    age = None if found is None else age_of(found.config, smolfile.policy, now=context.now())
    existing = None if age is not None and age.is_over else found
    name = smolfile.name or artifact_name(smolfile.path.parent.name)
    compared: Digest | None = None
    changes: tuple[Change, ...] | None = ()
    if existing is None or against is not None:
        compared, changes = _compare(context, name, against, inputs, tree, lock.lock)
    run = run_config(smolfile, base.config)
    run = replace(run, env=merge_env(trust_env, run.env))
    return Plan(
        smolfile=smolfile,
        name=name,
        lock=lock,
        files=files,
        local_base=has_local_base(smolfile),
        authorities=authorities,
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
        compared=compared,
        changes=changes,
        locked=locked,
    )


def _compare(
    context: BuildContext,
    name: str,
    against: str | None,
    inputs: KeyInputs,
    tree: KeyTree,
    lock: Lock,
) -> tuple[Digest | None, tuple[Change, ...] | None]:
    """Return the artifact that is ``against``, or the last build of ``name``, and what differs."""
    # Nothing changed is the common case, and needs no words.
    from smolbuild.build.explain import changes_since

    last = None if against is not None else context.store.find(last_name(name))
    if against is None and last is None:
        return None, None
    try:
        other = load_artifact(context.store, last or context.store.resolve(against or ""))
        changes = changes_since(context, other.config, inputs=inputs, tree=tree, lock=lock)
    except VerificationError:
        if against is not None:
            raise
        return None, None  # a last build that is damaged is none
    return other.index.descriptor.digest, changes


def _drift(
    context: BuildContext, smolfile: Smolfile, lock: LockState, *, locked: bool, force: bool
) -> "tuple[LockState, Drift | None]":
    if smolfile.policy.on_base_drift is None and not force:
        return lock, None  # the common case
    from smolbuild.build.drift import heed_drift

    return heed_drift(context, smolfile, lock, locked=locked, force=force)


def _authorities(
    smolfile: Smolfile,
) -> "tuple[tuple[Authority, ...], tuple[tuple[str, str], ...]]":
    if not smolfile.ca_files:
        return (), ()  # the common case
    from smolbuild.build.authorities import authority_env, read_authorities

    return read_authorities(smolfile), authority_env(smolfile)


def _refuse_half_networks(smolfile: Smolfile) -> None:
    for step in smolfile.steps:
        if isinstance(step.network, tuple) and smolfile.network.mode == "full":
            raise UsageError(
                f"step {step.name} names hosts to reach, but in a machine with a full network "
                "nothing can be held to a list",
                hint="put the hosts into network.allow_hosts and leave out `net = true`",
                code="network-list",
            )
