"""What a build leaves, and the shortest way to it: an artifact with the plan's key is there."""

from collections.abc import Sequence
from typing import Literal

from smolbuild.build.age import age_of
from smolbuild.build.context import BuildContext
from smolbuild.build.plan import Plan
from smolbuild.core.digest import Digest
from smolbuild.core.values import dataclass
from smolbuild.store.artifact import Artifact, find_whole
from smolbuild.store.layout import last_name

__all__ = ["BuildResult", "Proof", "reuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One restored fork: its ids, milliseconds from the request to health, clock error in ms."""

    machine_id: str
    boot_id: str
    random_sha256: Digest
    ready_ms: int
    clock_error_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The artifact, its names and where it comes from."""

    artifact: Artifact
    names: tuple[str, ...]
    origin: Literal["built", "local", "remote"]
    """Built by this command, or found: in the local store, in the remote cache."""
    proofs: tuple[Proof, ...] = ()
    plan: Plan | None = None
    """What was built instead of what was asked for, when the base's image had to be made anew."""

    @property
    def reused(self) -> bool:
        """Whether nothing had to be built."""
        return self.origin != "built"


def reuse(context: BuildContext, plan: Plan, names: Sequence[str]) -> BuildResult | None:
    """Name the local artifact that has the plan's key, and return it; None: there is none.

    Starts no machine. Idempotent. An artifact of which something is missing is none.
    """
    # None in the plan may be outdated: another build of this key may have ended since.
    artifact = plan.existing or find_whole(context.store, plan.key)
    if artifact is None or age_of(artifact.config, plan.smolfile.policy, now=context.now()).is_over:
        return None
    context.store.name(artifact.index.descriptor, last_name(plan.name), *names)
    return BuildResult(artifact=artifact, names=tuple(names), origin="local")
