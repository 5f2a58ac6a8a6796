"""What every build needs of the world, gathered in one value."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from smolbuild.core.events import Emit, PhaseFinished, PhaseStarted
from smolbuild.core.home import Home
from smolbuild.core.values import dataclass
from smolbuild.model.contract import Contract
from smolbuild.source.docker_engine import DockerEngine
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.store.layout import Store

if TYPE_CHECKING:
    from smolbuild.build.kept import OnFailure
    from smolbuild.machine.base import Engine

__all__ = ["BuildContext", "Phases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """State directory, store, engines, registry access, environment and where events go."""

    home: Home
    store: Store
    contract: Callable[[], Contract]
    """Says what this host offers, without an engine being loaded."""
    open_engine: Callable[[], "Engine"]
    """Loads the engine; a command that starts no machine never calls it."""
    fetcher: ImageFetcher
    docker: DockerEngine
    """Asked only for bases that are its images."""
    environment: Mapping[str, str]
    emit: Emit
    now: Callable[[], float] = time.time
    on_failure: "OnFailure | None" = None
    """Is shown the machine when a step, a service or the health check fails."""

    @property
    def engine(self) -> "Engine":
        """The engine, loaded at the first use."""
        return self.open_engine()


@dataclass(slots=True)
class Phases:
    """Times the phases of one command and says so in events."""

    emit: Emit
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each finished phase, in order."""
    started: float = field(default_factory=time.monotonic)

    def total(self) -> float:
        """Return the seconds since this value was made, which is when the command began."""
        return round(time.monotonic() - self.started, 3)

    @contextlib.contextmanager
    def phase(self, name: str, text: str, *, when: bool = True) -> Iterator[None]:
        """Time the block as phase ``name``; not ``when`` there is nothing in it to do."""
        if not when:
            yield
            return
        self.emit(PhaseStarted(phase=name, text=text))
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        self.emit(PhaseFinished(phase=name, text=text, seconds=seconds))
