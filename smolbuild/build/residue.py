"""The gate that lets no artifact pass in which a secret, a private key or a token is left."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from smolbuild.build.pack import Delta
from smolbuild.build.secrets import Secrets
from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.core.errors import HealthError, SmolbuildError
from smolbuild.core.files import private_directory, write_atomic
from smolbuild.machine.base import Checkpoint
from smolbuild.model.smolfile import Smolfile
from smolbuild.residue import shapes
from smolbuild.residue.forms import MIN_SECRET, forms_of
from smolbuild.residue.media import (
    across_deltas,
    delta_medium,
    file_medium,
    layered_disk,
)
from smolbuild.residue.scanner import Scanner
from smolbuild.residue.search import Trace, search
from smolbuild.residue.traces import AROUND
from smolbuild.source.ext4_owners import Place, PlaceKind
from smolbuild.source.ext4_reader import Ext4
from smolbuild.source.ext4_volume import ReadDisk
from smolbuild.store.qcow2 import clusters, virtual_size

__all__ = ["ResidueGate"]

BASE = "base"
_SHOWN = 20
_HOST_KEYS = "/etc/ssh/ssh_host_*_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A trace, and what the file system says of its place; None where there is none to ask."""

    trace: Trace
    place: Place | None
    writer: str
    """The step whose delta brought it; empty where it is on no disk."""

    @property
    def path(self) -> str:
        return "" if self.place is None else self.place.path.decode(errors="replace")


class ResidueGate:
    """Searches what a build is about to keep or to ship.

    Args:
        cache: ``Home.cache``: the compiled scanner, and which tokens each base disk holds.
        smolfile: what is built.
        secrets: its secrets.

    """

    def __init__(self, cache: Path, smolfile: Smolfile, secrets: Secrets) -> None:
        self._cache = cache
        self._smolfile = smolfile
        self._secrets = secrets

    @functools.cached_property
    def _scanner(self) -> Scanner:
        return Scanner(self._cache)

    def is_clean(
        self,
        *,
        overlay: Path | None = None,
        memory: Path | None = None,
        state: Path | None = None,
    ) -> bool:
        """Return whether what is given is free of every secret that a step was given so far.

        Args:
            overlay: a step's finished delta.
            memory: the machine's memory after it.
            state: its device state.

        Raises:
            HostError: the search failed.

        """
        values = {secret.name: secret.value for secret in self._secrets.known()}
        if not values:
            return True
        media = []
        if overlay is not None:
            media.append(delta_medium(overlay, "", list(clusters(overlay))))
        if memory is not None:
            media.append(file_medium(memory, "memory"))
        if state is not None:
            media.append(file_medium(state, "device state"))
        return not search(self._scanner, media, values, shapes=False)

    def check(
        self, base: Path, base_digest: Digest, deltas: Sequence[Delta], checkpoint: Checkpoint
    ) -> None:
        """Search memory, device state and every delta that is shipped.

        Searched for are all secrets of the Smolfile that can be read, and tokens and private keys
        that the base does not hold already; secrets are searched for in the base, too.

        Raises:
            HealthError: something was found; code ``residue``. Names the secret or the kind of
                token, where it lies and what to do, never a value.
            HostError: the search failed.

        """
        values = {secret.name: secret.value for secret in self._secrets.readable()}
        on_disk = [(delta.step, delta.overlay, delta.extents) for delta in deltas]
        media = [
            file_medium(checkpoint.memory, "memory"),
            file_medium(checkpoint.state, "device state"),
            *(delta_medium(path, step, extents) for step, path, extents in on_disk),
            *across_deltas(on_disk, AROUND),
        ]
        known = self._known(base, base_digest) | set(self._smolfile.scrub.allow)
        traces = search(self._scanner, media, values, known=known)
        if values:
            below = file_medium(base, "disk", layer=BASE)
            traces += search(self._scanner, [below], values, shapes=False)
        if not traces:
            return
        found = self._without_allowed(_placed(traces, base, deltas))
        if found:
            raise self._refusal(found)

    def check_text(self, text: bytes, what: str) -> None:
        """Refuse ``text``, which becomes part of the artifact as ``what``, if it tells a secret.

        Raises:
            HealthError: it does; code ``residue``.

        """
        for secret in self._secrets.readable():
            if any(form.data in text for form in forms_of(secret.value)):
                raise HealthError(
                    f"the secret {secret.name} stands in {what}",
                    hint="do not write its value into the Smolfile; steps get it by name",
                    code="residue",
                )

    def _known(self, base: Path, digest: Digest) -> set[str]:
        """Return the fingerprints of the tokens in the base, which is public; remembered."""
        rules = hex_of(digest_bytes(Path(shapes.__file__).read_bytes()))[:16]
        note = private_directory(self._cache / "residue") / f"{hex_of(digest)}.{rules}.json"
        try:
            return set(json.loads(note.read_bytes()))
        except (FileNotFoundError, ValueError):
            pass
        traces = search(self._scanner, [file_medium(base, "disk", layer=BASE)], {})
        known = {trace.token.fingerprint for trace in traces if trace.token}
        write_atomic(note, json.dumps(sorted(known)).encode())
        return known

    def _without_allowed(self, found: Sequence[_Found]) -> list[_Found]:
        """Leave out tokens whose value lies in a file that may hold it, wherever else they lie."""
        paths = [path for path in self._smolfile.scrub.allow if path.startswith("/")]
        if "ssh-host-keys" in self._smolfile.restore.regenerate:
            paths.append(_HOST_KEYS)  # each fork makes its own
        allowed = {
            item.trace.token.fingerprint
            for item in found
            if item.trace.token and any(_covers(path, item.path) for path in paths)
        }
        return [
            item
            for item in found
            if item.trace.token is None or item.trace.token.fingerprint not in allowed
        ]

    def _refusal(self, found: Sequence[_Found]) -> HealthError:
        who = list(dict.fromkeys(_who(item.trace) for item in found))
        where = list(dict.fromkeys(_where(item) for item in found))
        lines = [
            f"{_who(item.trace)}, {item.trace.encoding}: {_where(item)}, byte "
            f"{item.trace.address:,}"
            for item in sorted(found, key=lambda item: (_who(item.trace), item.trace.medium.kind))
        ]
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"and {len(lines) - _SHOWN:,} more"]
        return HealthError(
            f"{'; '.join(who[:5])} {'is' if len(who) == 1 else 'are'} left in the artifact: "
            f"{'; '.join(where[:5])}",
            hint="; ".join(self._hints(found)),
            code="residue",
            details="\n".join(lines),
        )

    def _hints(self, found: Iterable[_Found]) -> list[str]:
        hints = []
        kinds = {_kind(item) for item in found}
        cleaned = self._smolfile.scrub.run is not None
        if "base" in kinds:
            hints.append("the base itself holds it: renew the secret, and mend the base")
        if "file" in kinds:
            hints.append("remove the file in the step, or with a command in [smolbuild.scrub] run")
        if "free" in kinds and not cleaned:
            hints.append(
                "what was deleted stays on the disk until [smolbuild.scrub] has a run list: "
                "run = [] is enough to have free blocks zeroed"
            )
        if "disk" in kinds or ("free" in kinds and cleaned):
            hints.append("find out what writes it: the file system still uses that place")
        if "memory" in kinds:
            hints.append(
                "a process that is alive holds it, or the kernel caches a file of it: restart the "
                "service in [smolbuild.scrub] run, or do not hand it the secret"
            )
        tokens = sorted({t.token.fingerprint for t in (i.trace for i in found) if t.token})
        if tokens:
            known = ", ".join(f'"{token}"' for token in tokens[:_SHOWN])
            hints.append(f"known test keys may stay: [smolbuild.scrub] allow = [{known}]")
        return hints


def _placed(traces: Sequence[Trace], base: Path, deltas: Sequence[Delta]) -> list[_Found]:
    """Ask the file system what lies where, and the deltas which of them wrote it."""
    names = [BASE, *(delta.step for delta in deltas)]
    # Whole, not as shipped: what a later step hides belongs to the disk as this one left it.
    chain = [(delta.overlay, list(clusters(delta.overlay))) for delta in deltas]
    disks = [layered_disk(base, chain[:count]) for count in range(len(names))]
    size = virtual_size(deltas[-1].overlay)
    on_disk: dict[int, list[int]] = {}
    for trace in traces:
        if trace.medium.kind == "disk":
            on_disk.setdefault(_index(names, trace), []).append(trace.address)
    places = {
        (layer, address): place
        for layer, addresses in on_disk.items()
        for address, place in _owners(disks[layer], size, addresses).items()
    }
    found = []
    for trace in traces:
        place, writer = None, ""
        if trace.medium.kind == "disk":
            layer = _index(names, trace)
            place = places.get((layer, trace.address))
            lies = disks[layer](trace.address, MIN_SECRET)
            writers = (n for n in range(layer) if disks[n](trace.address, MIN_SECRET) == lies)
            writer = names[next(writers, layer)]
        found.append(_Found(trace=trace, place=place, writer=writer))
    return found


def _index(names: Sequence[str], trace: Trace) -> int:
    """Return the layer of a trace; of layers with one name (a step may be called so) the last."""
    return len(names) - 1 - names[::-1].index(trace.medium.layer)


def _owners(disk: ReadDisk, size: int, addresses: Sequence[int]) -> Mapping[int, Place]:
    try:
        return Ext4(disk, size).owners_of(addresses)
    except SmolbuildError:  # no file system of ours: the find counts, its place is not known
        return {}


def _who(trace: Trace) -> str:
    if trace.token is not None:
        return f"{_article(trace.token.kind)} {trace.token.kind} ({trace.token.fingerprint})"
    return f"the secret {trace.secret}"


def _article(noun: str) -> str:
    return "an" if noun[0] in "AEIO" else "a"


def _where(item: _Found) -> str:
    medium = item.trace.medium
    if medium.kind != "disk":
        return medium.kind
    place = "disk block" if item.place is None else str(item.place)
    writer = "in the base" if item.writer == BASE else f"written by {item.writer}"
    return f"{place}, {writer}"


def _kind(item: _Found) -> str:
    if item.trace.medium.kind != "disk":
        return "memory"
    if item.trace.medium.layer == BASE:
        return "base"
    if item.place is not None and item.place.kind is PlaceKind.FILE:
        return "file"
    return "free" if item.place is not None and item.place.kind is PlaceKind.FREE else "disk"


def _covers(allowed: str, path: str) -> bool:
    return bool(path) and (
        path.startswith(allowed) if allowed.endswith("/") else fnmatchcase(path, allowed)
    )
