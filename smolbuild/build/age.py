"""How old an artifact is, and whether ``[smolbuild.policy] max_age`` still lets it be used."""

from dataclasses import dataclass
from datetime import UTC, datetime

from smolbuild.model.artifact import ArtifactConfig
from smolbuild.model.durations import spoken
from smolbuild.model.smolfile import Policy

__all__ = ["Age", "age_of", "oldest_delta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """Of one artifact: since when it exists, and the policy's limit; times in seconds."""

    created: str
    """RFC 3339, UTC."""
    seconds: float
    limit: float | None

    @property
    def is_over(self) -> bool:
        """Whether the policy rules it out."""
        return self.limit is not None and self.seconds > self.limit

    def __str__(self) -> str:
        """Return ``built 9 days ago, older than 7d``."""
        built = f"built {spoken(self.seconds)} ago"
        if self.limit is None:
            return built
        return f"{built}, {'older than' if self.is_over else 'limit'} {_short(self.limit)}"


def age_of(config: ArtifactConfig, policy: Policy, *, now: float) -> Age:
    """Return the age of the artifact with ``config``; a time that is none counts as 1970."""
    try:
        made = datetime.fromisoformat(config.created)
        created = (made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        created = 0.0
    return Age(created=config.created, seconds=max(0.0, now - created), limit=policy.max_age)


def oldest_delta(policy: Policy, *, now: float) -> float:
    """Return the time (seconds since 1970) before which a step's cached disk is too old to use."""
    return 0.0 if policy.max_age is None else now - policy.max_age


def _short(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s"
