"""The remote cache: a build's artifact under the tag ``key-<hex>`` of a registry repository.

Reading never fails a build: what cannot be had, verified or used is said, and the build goes on. An
artifact from there is used only after every check of an ordinary pull, and only when its signed
config has exactly the plan's provenance key.

Two builders that race on one key end with one published artifact, without a lock between them. Each
looks at the tag before it pushes, again when all but the tag is pushed, and again after it has set
the tag. Whoever finds a verified artifact of the key there that is not its own adopts it: it pulls
that one, and its local names and what it reports stand for it. The tag is therefore set twice only
when the second builder's last look falls before the first one's tagging and its own tagging after:
one round trip. OCI has no compare-and-swap that would close this window. Who falls into it keeps a
valid artifact of its own under its local names, while the tag names the other's; the registry still
answers everybody with the same one, and neither builder fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from smolbuild.build.age import age_of
from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.plan import Plan
from smolbuild.build.publish import publish
from smolbuild.build.pull import fetch_head, pull_head
from smolbuild.build.result import BuildResult
from smolbuild.build.undeclared import denied_in
from smolbuild.core.errors import RegistryError, SmolbuildError, UsageError, VerificationError
from smolbuild.core.events import Message
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.model.key import provenance_key
from smolbuild.model.keytree import tree_from_json
from smolbuild.model.reference import Reference, parse_repository
from smolbuild.model.smolfile import CachePolicy
from smolbuild.registry.client import RegistryClient, connect
from smolbuild.registry.retry import RetryPolicy, Timeouts
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import key_name, last_name
from smolbuild.trust.keyring import trusted_keys

__all__ = ["RemoteCache", "choose_cache", "has_artifact", "pull_remote", "share"]

_REGISTRY = "SMOLBUILD_CACHE_REGISTRY"
_PUSH = "SMOLBUILD_CACHE_PUSH"
_ABSENT = ("not-found", "name-unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    look: tuple[Timeouts, RetryPolicy]
    transfer: tuple[Timeouts, RetryPolicy]


_CACHE = _Patience(
    look=(Timeouts(connect=3, read=10), RetryPolicy(attempts=2, base=0.2, cap=1, patience=3)),
    transfer=(Timeouts(connect=5, read=30), RetryPolicy(attempts=3, cap=5, patience=20)),
)
"""Of what a build can do without. A look ends after 7 s without a connection, and after 41 s when
the registry accepts connections and says nothing."""
_ASKED_FOR = _Patience(look=(Timeouts(), RetryPolicy()), transfer=(Timeouts(), RetryPolicy()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCache:
    """Where artifacts are looked for before they are built, and whether new ones go there."""

    repository: Reference
    push: bool = False


def choose_cache(
    policy: CachePolicy,
    environment: Mapping[str, str],
    *,
    registry: str | None,
    push: bool | None,
) -> RemoteCache | None:
    """Return the remote cache in force: the arguments, else the environment, else the Smolfile.

    An empty registry means none. None for an argument: it was not given.

    Raises:
        UsageError: the registry is no repository's name, or pushing was asked for without one.

    """
    named = next(
        (text for text in (registry, environment.get(_REGISTRY)) if text is not None),
        policy.registry,
    )
    pushing = push if push is not None else _truth(environment.get(_PUSH), policy.push)
    if not named:
        if push:
            raise UsageError(
                "there is no remote cache to push to",
                hint=f"name one with --cache-registry, {_REGISTRY} or [smolbuild.cache] registry",
                code="cache-registry",
            )
        return None
    return RemoteCache(repository=parse_repository(named), push=pushing)


def has_artifact(context: BuildContext, plan: Plan, remote: RemoteCache) -> str:
    """Return what the remote cache says of the plan's key; nothing is fetched but the signed top.

    The answer is ``yes``, ``no``, or the reason why what is there cannot be used or asked for.
    """
    reference = remote.repository.tagged(key_name(plan.key))
    try:
        with _client(context, reference, _CACHE.look) as client:
            fetch_head(reference, client, trusted_keys(context.home))
    except RegistryError as error:
        return "no" if error.code in _ABSENT else error.message
    except SmolbuildError as error:
        return error.message
    return "yes"


def pull_remote(
    context: BuildContext, plan: Plan, remote: RemoteCache, names: Sequence[str], phases: Phases
) -> BuildResult | None:
    """Return the plan's artifact from the remote cache, pulled and named; None: build it.

    Starts no machine. What the registry does or has is never an error but a warning. Idempotent.
    """
    name = remote.repository.name
    with phases.phase("remote", f"looking into the remote cache {name}"):
        try:
            artifact = _there(context, plan, remote.repository, names, _CACHE)
        except SmolbuildError as error:
            artifact = None
            _tell(context, f"the remote cache {name} is not used: {error.message}", error)
    if artifact is None:
        return None
    return BuildResult(artifact=artifact, names=tuple(names), origin="remote")


def share(
    context: BuildContext,
    plan: Plan,
    result: BuildResult,
    repository: Reference,
    *,
    renew: bool = False,
    optional: bool = False,
) -> tuple[BuildResult, int]:
    """Publish the result under its key in ``repository``, or adopt what another builder published.

    Idempotent; see the module for two at once.

    Args:
        context: the world.
        plan: what was built.
        result: the artifact to publish.
        repository: where; its tag ``key-<hex>`` is set.
        renew: replace what is there instead of adopting it: a rebuild was asked for.
        optional: give up early on a registry that does not answer.

    Returns:
        The result in force, and the bytes sent.

    Raises:
        RegistryError: the registry failed after retries.
        VerificationError: the local artifact is damaged, or the registry answers other bytes.

    """
    mine = result.artifact
    reference = repository.tagged(key_name(plan.key))
    patience = _CACHE if optional else _ASKED_FOR
    there: Artifact | None = None
    told: set[str] = set()

    def free() -> bool:
        nonlocal there
        if not renew:
            try:
                there = _there(context, plan, repository, result.names, patience, mine=mine)
            except VerificationError as error:
                if error.code not in told:  # looked at up to three times
                    _tell(context, f"{reference} is replaced: {error.message}", error)
                told.add(error.code)
        return there is None

    sent = 0
    if free():
        with _client(context, reference, patience.transfer) as client:
            done = publish(context.store, mine, reference, client, emit=context.emit, may_tag=free)
        sent = done.bytes_pushed
        if there is None:
            free()
    if there is None or there is mine:
        return result, sent
    digest = there.index.descriptor.digest
    text = f"{repository.name} has an artifact of this key already: {digest} is used instead"
    context.emit(Message(level="info", text=text))
    return replace(result, artifact=there, origin="remote", proofs=()), sent


def _there(
    context: BuildContext,
    plan: Plan,
    repository: Reference,
    names: Sequence[str],
    patience: _Patience,
    *,
    mine: Artifact | None = None,
) -> Artifact | None:
    """Return the verified artifact of the plan's key, pulled and named unless it is ``mine``.

    Raises:
        VerificationError: what is there fails a check, is not of this key, or is not complete.
        RegistryError: the registry cannot be asked.

    """
    reference = repository.tagged(key_name(plan.key))
    with _client(context, reference, patience.look) as client:
        found = client.head_manifest(reference)
        if found is None or (mine and mine.index.descriptor.digest == found.digest):
            return mine if found else None
    try:
        # By digest from here on: the tag may move at any time.
        with _client(context, reference, patience.look) as client:
            head = fetch_head(reference.at(found.digest), client, trusted_keys(context.home))
        with _client(context, reference, patience.transfer) as client:
            done = pull_head(
                context.store,
                head,
                repository.repository,
                client,
                names=(key_name(plan.key), last_name(plan.name), *names),
                accept=_accepts(context, plan),
                emit=context.emit,
            )
    except RegistryError as error:
        if error.code not in _ABSENT:
            raise
        raise VerificationError(
            f"{reference} is not complete: {error.message}", code="incomplete"
        ) from error
    return done.artifact


def _accepts(context: BuildContext, plan: Plan) -> Callable[[ArtifactConfig], None]:
    key = plan.key

    def accept(config: ArtifactConfig) -> None:
        if config.key != key or provenance_key(tree_from_json(config.key_tree)) != key:
            raise VerificationError(
                f"the artifact under the tag of key {key} was made of other inputs",
                hint="somebody moved the tag: remove it from the registry",
                code="key-mismatch",
            )
        age = age_of(config, plan.smolfile.policy, now=context.now())
        if age.is_over:
            raise VerificationError(f"the artifact there is too old: {age}", code="too-old")
        if plan.smolfile.policy.undeclared == "fail":
            for text in denied_in(config.results.egress):
                raise VerificationError(f"undeclared input there: {text}", code="undeclared")

    return accept


def _client(
    context: BuildContext, reference: Reference, limits: tuple[Timeouts, RetryPolicy]
) -> RegistryClient:
    timeouts, retries = limits
    return connect(
        reference.registry,
        context.environment,
        timeouts=timeouts,
        retries=retries,
        emit=context.emit,
    )


def _tell(context: BuildContext, text: str, error: SmolbuildError) -> None:
    """Say what was not used: loudly, unless it is only what the policy is there for."""
    text = f"{text} ({error.hint})" if error.hint else text
    context.emit(Message(level="info" if error.code == "too-old" else "warning", text=text))


def _truth(text: str | None, usual: bool) -> bool:
    if text is None:
        return usual
    if text.lower() in {"1", "true", "yes"}:
        return True
    if text.lower() in {"", "0", "false", "no"}:
        return False
    raise UsageError(f"{_PUSH} is {text[:40]!r}", hint="set it to 1 or 0", code="cache-push")
