"""What is kept of each link of the chain when it has run: its delta, and the machine after it."""

from dataclasses import dataclass
from pathlib import Path

from smolbuild.build.cache import StepCache
from smolbuild.build.cache_entry import DISK, Entry, SavedMemory
from smolbuild.build.plan import Plan
from smolbuild.build.residue import ResidueGate
from smolbuild.core.errors import HostError
from smolbuild.core.events import Emit, Message
from smolbuild.core.files import remove_tree
from smolbuild.machine.base import Machine
from smolbuild.machine.memory import keep_file
from smolbuild.model.egress import EgressRecord

__all__ = ["Keeper", "StepRun"]


_MOST_MEMORY = 2 << 30
"""Bytes of guest memory in use that are saved after a step: some seconds, as long as a boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """A link of the chain, run now or earlier: its name and what it left."""

    name: str
    overlay: Path
    """Its delta, in the build's own directory."""
    entry: Entry | None = None
    """What it is, or will be once it is on the disk, in the step cache; None: it is not kept."""
    egress: tuple[EgressRecord, ...] = ()
    """What it asked of the network."""


class Keeper:
    """Keeps the links that one build runs, each on top of the one before.

    Args:
        cache: receives them.
        plan: what is being built.
        residue: says whether a secret was left in what would be kept.
        below: the token of the disk that the machine was started from.
        work: the build's own directory.
        emit: is told what cannot be kept.

    """

    def __init__(
        self,
        cache: StepCache,
        plan: Plan,
        residue: ResidueGate,
        *,
        below: str,
        work: Path,
        emit: Emit,
    ) -> None:
        self._cache = cache
        self._plan = plan
        self._residue = residue
        self._below: str | None = below
        self._work = work
        self._emit = emit
        self._told = False

    def keep(
        self, machine: Machine, link: int, name: str, egress: tuple[EgressRecord, ...]
    ) -> StepRun:
        """Save ``machine`` after the link of that number and name ran; it goes on running.

        What would bring a secret into the cache is not kept, nor is what lies on it.

        Raises:
            MachineError: it cannot be saved, or does not go on.
            OSError: the disk is full, for example.

        """
        if self._below is None:
            return StepRun(name=name, overlay=machine.snapshot_disk(), egress=egress)
        directory = self._cache.stage()
        memory = self._save(machine, directory)
        overlay = self._work / f"step-{link}.qcow2"
        keep_file(directory / DISK, overlay)
        if not self._residue.is_clean(overlay=overlay):
            self._below = None
            text = (
                f"after step {name} a secret is on the disk: neither it nor a later step is cached"
            )
            self._emit(Message(level="warning", text=text))
            remove_tree(directory)
            return StepRun(name=name, overlay=overlay, egress=egress)
        if memory is not None:
            memory = self._without_secrets(memory)
        entry = self._cache.keep(
            directory,
            self._plan.chain[link],
            self._below,
            step=name,
            artifact=self._plan.name,
            memory=memory,
            egress=egress,
        )
        self._below = entry.token
        return StepRun(name=name, overlay=overlay, entry=entry, egress=egress)

    def _save(self, machine: Machine, directory: Path) -> SavedMemory | None:
        if self._plan.smolfile.resume == "memory" and self._is_worth_it(machine):
            try:
                saved = machine.snapshot(directory)
            except HostError as error:
                text = f"only the disk of this step is kept, not its memory: {error.message}"
                self._emit(Message(level="warning", text=text))
                for path in directory.iterdir():
                    path.unlink()
            else:
                return SavedMemory(
                    memory=saved.memory,
                    state=saved.state,
                    shape=self._plan.shape,
                    contract=saved.contract,
                    agent_cursor=saved.agent_cursor,
                    zero_freed=self._plan.smolfile.guarded,
                )
        keep_file(machine.snapshot_disk(), directory / DISK)
        return None

    def _is_worth_it(self, machine: Machine) -> bool:
        """Return whether saving the memory costs less than a boot would; say once that it does not.

        A machine of many gigabytes would write them all after every step.
        """
        used = machine.memory_in_use()
        if used <= _MOST_MEMORY:
            return True
        if not self._told:
            self._told = True
            text = (
                f"the machine has {used / 1e9:.1f} GB of memory in use: from here on only its disk "
                "is kept, and a build that goes on from there boots"
            )
            self._emit(Message(level="info", text=text))
        return False

    def _without_secrets(self, memory: SavedMemory) -> SavedMemory | None:
        """Return the saved machine, or let it go when a secret is left in it."""
        if self._residue.is_clean(memory=memory.memory, state=memory.state):
            return memory
        memory.memory.unlink()
        memory.state.unlink()
        return None
