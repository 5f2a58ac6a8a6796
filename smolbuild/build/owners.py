"""Owners of copies that only the guest's own user database can resolve."""

import io
import tarfile
from collections.abc import Iterable, Mapping

from smolbuild.build.tarstream import named_owners
from smolbuild.core.errors import BuildError
from smolbuild.machine.base import Machine
from smolbuild.model.smolfile import Copy

__all__ = ["guest_owners", "resolve_owners"]

_SECONDS = 60.0
_LIMIT = 16 << 20


def guest_owners(machine: Machine, copies: Iterable[Copy]) -> Mapping[str, tuple[int, int]]:
    """Return uid and gid of the owners that ``copies`` name, from the guest's /etc. Idempotent.

    The guest is asked only when there is such an owner. An owner the guest does not know is left
    out: ``tar_stream`` says which copy wants it.

    Raises:
        MachineError: the guest has no user database, or does not answer in time.
        BuildError: its user database is absurdly large or not a file.

    """
    owners = named_owners(copies)
    if not owners:
        return {}
    return resolve_owners(owners, _read(machine, "/etc/passwd"), _read(machine, "/etc/group"))


def resolve_owners(
    owners: Iterable[str], passwd: bytes, group: bytes
) -> Mapping[str, tuple[int, int]]:
    """Return uid and gid of ``user`` or ``user:group`` by the text of /etc/passwd and /etc/group.

    A user alone brings its own group. Numbers stand for themselves; unknown names are left out.
    """
    users = {fields[0]: fields for fields in _records(passwd, 4)}
    groups = {fields[0]: fields[2] for fields in _records(group, 3)}
    found = {}
    for owner in owners:
        user, _, wanted = owner.partition(":")
        record = users.get(user)
        uid = _number(record[2] if record else user)
        own = record[3] if record else user
        gid = _number(groups.get(wanted, wanted) if wanted else own)
        if uid is not None and gid is not None:
            found[owner] = (uid, gid)
    return found


def _records(text: bytes, fields: int) -> Iterable[list[str]]:
    for line in text.decode(errors="replace").splitlines():
        record = line.split(":")
        if len(record) >= fields:
            yield record


def _number(text: str) -> int | None:
    whole = text.isascii() and text.isdigit() and len(text) <= 10
    return int(text) if whole and int(text) < 2**32 - 1 else None


def _read(machine: Machine, path: str) -> bytes:
    archive = bytearray()
    for chunk in machine.get(path, timeout=_SECONDS):
        archive += chunk
        if len(archive) > _LIMIT:
            raise BuildError(f"{path} in the guest is larger than {_LIMIT:,} bytes")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            member = opened.next()
            content = opened.extractfile(member) if member is not None else None
            if content is not None:
                return content.read()
    except (tarfile.TarError, KeyError) as error:
        raise BuildError(f"{path} in the guest cannot be read: {error}") from error
    raise BuildError(f"{path} in the guest is not a file")
