"""Read the agent's survey: raw parts of the guest's ``/proc`` (see ``docs/agent-protocol.md``).

The guest is not trusted: what does not fit is left out, and nothing here grows beyond what came.
Formats: proc(5) for ``status``, ``cgroup`` and ``net/tcp``.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from smolbuild.core.errors import MachineError
from smolbuild.model.inside import GuestPort, GuestProcess, Survey

__all__ = ["MAX_SURVEY_BYTES", "parse_survey"]

MAX_SURVEY_BYTES = 64 << 20
_HEAD = re.compile(rb"([a-z0-9]{1,16}) ([0-9]{1,10}) ([0-9]{1,8})\n")
_SERVICE = "service:"
_CGROUP = re.compile(r"^0::(?:.*/)?smolbuild/([0-9]+)$", re.MULTILINE)
_TABLES = {"tcp": "tcp", "tcp6": "tcp", "udp": "udp", "udp6": "udp"}
_WAITING = {"tcp": "0A", "udp": "07"}
"""States of sockets: LISTEN, and for datagrams not connected to anybody."""
_CMDLINE = 16384
"""Bytes at which the agent cuts a command line."""
_ARGUMENTS = 64
_DEPTH = 64


@dataclass(slots=True)
class _Process:
    name: str = ""
    argv: tuple[str, ...] = ()
    uid: str = ""
    parent: int = 0
    group: str = ""
    sockets: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    hidden: set[int] = field(default_factory=set)
    """The agent and the survey's own process."""
    processes: dict[int, _Process] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    """Ids of executions by the number of their control group."""
    firsts: dict[int, str] = field(default_factory=dict)
    """Ids of executions by their first process."""
    users: dict[str, str] = field(default_factory=dict)
    sockets: list[tuple[str, str, int, str]] = field(default_factory=list)
    """Protocol, address, port and inode."""


def parse_survey(data: bytes) -> Survey:
    """Return what the survey ``data`` says.

    Raises:
        MachineError: the records are malformed.

    """
    found = _Found()
    for kind, number, content in _records(data):
        _take(found, kind, number, content)
    services = {pid: _service(found, pid) for pid in found.processes}
    alike = Counter(
        (
            services[pid],
            process.name,
            process.argv,
            found.users.get(process.uid, process.uid),
        )
        for pid, process in found.processes.items()
        if pid not in found.hidden and process.argv
    )
    return Survey(
        processes=tuple(
            GuestProcess(name=name, argv=argv, user=user, service=service, count=count)
            for (service, name, argv, user), count in sorted(alike.items())
        ),
        ports=_ports(found, services),
    )


def _records(data: bytes) -> Iterator[tuple[str, int, bytes]]:
    place = 0
    while place < len(data):
        head = _HEAD.match(data, place)
        if head is None or head.end() + int(head[3]) > len(data):
            raise MachineError("the agent's survey is malformed", code="agent-protocol")
        place = head.end() + int(head[3])
        yield head[1].decode(), int(head[2]), data[head.end() : place]


def _take(found: _Found, kind: str, number: int, content: bytes) -> None:
    words = content.decode("utf-8", "replace")
    process = found.processes.setdefault(number, _Process()) if kind in _OF_PROCESSES else None
    if process is not None:
        _OF_PROCESSES[kind](process, words)
    elif kind in {"agent", "worker"}:
        found.hidden.add(number)
    elif kind == "job":
        found.jobs[str(number)] = words
    elif kind == "first":
        found.firsts[number] = words
    elif kind == "passwd":
        for line in words.splitlines():
            name, _, rest = line.partition(":")
            found.users.setdefault(rest.partition(":")[2].partition(":")[0], name)
    elif kind in _TABLES:
        found.sockets.extend(_sockets(_TABLES[kind], words))


def _take_cmdline(process: _Process, words: str) -> None:
    arguments = words.rstrip("\0").split("\0")
    if len(words.encode()) >= _CMDLINE:  # the last one is cut: half a secret could not be masked
        del arguments[-1]
    process.argv = tuple(argument.rstrip() for argument in arguments[:_ARGUMENTS])


def _take_status(process: _Process, words: str) -> None:
    fields = dict(line.partition(":")[::2] for line in words.splitlines())
    process.name = fields.get("Name", "").strip()
    process.uid = fields.get("Uid", "").strip().partition("\t")[0]
    parent = fields.get("PPid", "").strip()
    process.parent = int(parent) if parent.isascii() and parent.isdecimal() else 0


def _take_cgroup(process: _Process, words: str) -> None:
    group = _CGROUP.search(words)
    process.group = group[1] if group else ""


def _take_sockets(process: _Process, words: str) -> None:
    process.sockets = tuple(words.split())


_OF_PROCESSES = {
    "cmdline": _take_cmdline,
    "status": _take_status,
    "cgroup": _take_cgroup,
    "sockets": _take_sockets,
}


def _service(found: _Found, pid: int) -> str:
    """Return the service that started a process: by its control group, else by its parents."""
    exec_id = found.jobs.get(found.processes[pid].group, "")
    for _ in range(_DEPTH):
        if exec_id or pid not in found.processes:
            break
        exec_id = found.firsts.get(pid, "")
        pid = found.processes[pid].parent
    return exec_id.removeprefix(_SERVICE) if exec_id.startswith(_SERVICE) else ""


def _sockets(protocol: str, table: str) -> Iterator[tuple[str, str, int, str]]:
    for line in table.splitlines()[1:]:
        columns = line.split()
        if len(columns) < 10 or columns[3] != _WAITING[protocol]:
            continue
        address, _, port = columns[1].partition(":")
        try:
            yield protocol, _address(address), int(port, 16), columns[9]
        except ValueError:
            continue


def _address(text: str) -> str:
    """Return an address of ``/proc/net``: words of 32 bits, in the byte order of the processor."""
    data = bytes.fromhex(text)
    words = [data[place : place + 4][::-1] for place in range(0, len(data), 4)]
    return str(ipaddress.ip_address(b"".join(words)))


def _ports(found: _Found, services: Mapping[int, str]) -> tuple[GuestPort, ...]:
    owners: dict[str, int] = {}
    for pid in sorted(found.processes):
        for inode in found.processes[pid].sockets:
            owners.setdefault(inode, pid)
    ports = set()
    for protocol, address, port, inode in found.sockets:
        owner = owners.get(inode)
        if owner in found.hidden or not port:
            continue
        name = found.processes[owner].name if owner is not None else ""
        service = services[owner] if owner is not None else ""
        ports.add((protocol, port, address, name, service))
    return tuple(
        GuestPort(protocol=protocol, address=address, port=port, process=name, service=service)
        for protocol, port, address, name, service in sorted(ports)
    )
