"""Values with a notation of their own: variables, ports, volumes, hosts, probes."""

import ipaddress
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from smolbuild.model.smolfile import (
    ExecProbe,
    FileProbe,
    Health,
    HttpProbe,
    PortProbe,
    Probe,
    SecretSource,
)
from smolbuild.model.tables import Report, Table, show

__all__ = [
    "check_hosts",
    "given",
    "inside",
    "read_cidrs",
    "read_env",
    "read_hosts",
    "read_ports",
    "read_probe",
    "read_secrets",
    "read_timing",
    "read_volumes",
]

T = TypeVar("T")

_MAX_PORTS = 64
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_PATTERN = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")
_REQUEST_PATH = re.compile(r"/[!-~]*")


def given(value: T | None, usual: T) -> T:
    """Return ``value``, or ``usual`` when the file does not give it."""
    return usual if value is None else value


def read_env(
    report: Report, entries: Iterable[tuple[str, str]], environment: Mapping[str, str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the variables of ``(entry, key)`` pairs and the names taken from the host.

    As upstream: entries are trimmed, a later one wins, a bare name takes the host's value, an entry
    without a name is dropped (with a notice). A name that the host does not have is a problem.
    """
    values: dict[str, str] = {}
    imported: dict[str, None] = {}
    for entry, key in entries:
        name, equals, value = entry.strip().partition("=")
        if not name:
            report.notice(key, "an entry without a variable's name is dropped, as smolvm does")
        elif re.search(r"\s", name):
            report.problem(key, f"expected KEY=VALUE with no white space in KEY, got {show(entry)}")
        elif equals:
            values[name] = value
            imported.pop(name, None)
        elif name not in environment:
            report.problem(
                key,
                f"{name} takes the host's value, but the host has no variable {name}",
                f'set it, or write "{name}=VALUE"',
            )
        elif "\0" in environment[name] or not _is_text(environment[name]):
            report.problem(key, f"the host's value of {name} is not UTF-8 text")
        else:
            values[name] = environment[name]
            imported[name] = None
            report.notice(
                key,
                f"{name} takes the host's value: an input that this file does not declare",
                undeclared=True,
            )
    return tuple(values.items()), tuple(imported)


def read_ports(table: Table, name: str) -> tuple[tuple[int, int], ...]:
    """Return the ``(host, guest)`` pairs of a list of port mappings, ranges written out."""
    pairs: list[tuple[int, int]] = []
    for entry, where in table.listed(name):
        host, _, guest = entry.strip().partition(":")
        hosts, guests = _port_range(host), _port_range(guest or host)
        if hosts is None or guests is None:
            table.report.problem(where, f"expected ports from 1 to 65535, got {show(entry)}")
        elif len(hosts) != len(guests):
            table.report.problem(where, f"the two ranges differ in length in {show(entry)}")
        elif len(pairs) + len(hosts) > _MAX_PORTS:
            table.report.problem(where, f"more than {_MAX_PORTS} ports are mapped")
        else:
            taken = {port for port, _ in pairs}
            for port in sorted(taken.intersection(hosts)):
                table.report.problem(where, f"host port {port} is mapped twice")
            pairs.extend(zip(hosts, guests, strict=True))
    return tuple(pairs)


def _port_range(text: str) -> range | None:
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    return range(low, high + 1) if 1 <= low <= high <= 65535 else None


def read_volumes(table: Table, name: str) -> tuple[str, ...]:
    """Return a list of volumes as written; two with one target are a problem."""
    volumes = table.listed(name)
    targets: set[str] = set()
    for volume, where in volumes:
        target = posixpath.normpath(volume.split(":")[1])
        if target in targets:
            table.report.problem(where, f"two volumes are mounted at {target}")
        targets.add(target)
    return tuple(volume for volume, _ in volumes)


def read_hosts(table: Table, name: str, *, patterns: bool = False) -> tuple[str, ...]:
    """Return a list of host names in lower case, or of patterns."""
    return check_hosts(table.report, table.listed(name), patterns=patterns)


def check_hosts(
    report: Report, hosts: Iterable[tuple[str, str]], *, patterns: bool = False
) -> tuple[str, ...]:
    """Return the names of ``(host, key)`` pairs in lower case, each once."""
    grammar = _PATTERN if patterns else _HOST
    names: dict[str, None] = {}
    for host, key in hosts:
        folded = host.strip().lower()
        if not grammar.fullmatch(folded) or len(folded) > 253:
            hint = "write the name only, without scheme, port or path"
            if folded.startswith("*.") and not patterns:
                hint = "write the name without `*.`: its subdomains are allowed too"
            report.problem(key, f"expected a host name, got {show(host)}", hint)
        else:
            names[folded.removesuffix(".")] = None
    return tuple(names)


def read_cidrs(table: Table, name: str) -> tuple[str, ...]:
    """Return a list of address ranges in their one usual form."""
    ranges: dict[str, None] = {}
    for text, where in table.listed(name):
        try:
            ranges[str(ipaddress.ip_network(text.strip(), strict=False))] = None
        except ValueError:
            table.report.problem(where, f"expected a range such as 10.0.0.0/8, got {show(text)}")
    return tuple(ranges)


def read_probe(table: Table) -> Probe | None:
    """Return the one probe of a table; none or several are a problem."""
    given = [name for name in ("port", "http", "file", "exec") if table.has(name)]
    probes = {
        "port": _port_probe(table),
        "http": _http_probe(table),
        "file": _file_probe(table),
        "exec": _exec_probe(table),
    }
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        table.report.problem(table.path, f"expected one of port, http, file and exec, got {what}")
        return None
    if table.has("host") and given != ["port"]:
        table.problem("host", f"host goes with port, not with {given[0]}")
    return probes[given[0]]


def read_secrets(parent: Table, *, command: bool = False) -> Mapping[str, SecretSource]:
    """Return the sources of the secrets that the table ``secrets`` of ``parent`` names.

    With ``command`` a value may come from a command of the host, too.
    """
    kinds = ("from_env", "from_file", *(("from_command",) if command else ()))
    sources = {}
    for name, table in parent.named_tables("secrets").items():
        sources[name] = SecretSource(
            from_env=table.text("from_env"),
            from_file=table.text("from_file"),
            from_command=(table.texts("from_command") or None) if command else None,
        )
        if sum(table.has(kind) for kind in kinds) != 1:
            table.report.problem(
                table.path,
                f"expected exactly one of {', '.join(kinds[:-1])} and {kinds[-1]}",
                f'write {name} = {{ from_env = "{name}" }}',
            )
        elif command and table.has("from_command") and not sources[name].from_command:
            table.problem("from_command", "expected a program and its arguments")
    return sources


def read_timing(table: Table, probe: Probe | None) -> Health | None:
    """Return the health check of ``probe`` with the table's timing; None without a probe."""
    interval, timeout = table.duration("interval"), table.duration("timeout")
    grace, retries = table.duration("startup_grace"), table.integer("retries")
    if timeout == 0:
        table.problem("timeout", "expected a time above zero")
    if probe is None:
        return None
    usual = Health(probe=probe)
    return Health(
        probe=probe,
        interval=given(interval, usual.interval),
        timeout=given(timeout, usual.timeout),
        startup_grace=given(grace, usual.startup_grace),
        retries=given(retries, usual.retries),
    )


def inside(report: Report, key: str, path: str) -> str | None:
    """Return a path relative to the Smolfile's directory in its one form; outside is a problem."""
    normal = posixpath.normpath(path)
    if normal == ".." or normal.startswith(("../", "/")):
        report.problem(
            key,
            f"{show(path)} lies outside the Smolfile's directory",
            "declared files must be inside it, so that the build is the same everywhere",
        )
        return None
    return normal


def _port_probe(table: Table) -> PortProbe | None:
    port, host = table.integer("port"), _loopback(table.text("host"))
    _check_address(table, "host", host)
    return None if port is None else PortProbe(port=port, host=host)


def _file_probe(table: Table) -> FileProbe | None:
    path = table.text("file")
    return None if path is None else FileProbe(path=path)


def _exec_probe(table: Table) -> ExecProbe | None:
    argv = table.texts("exec")
    if table.has("exec") and not argv:
        table.problem("exec", "expected a command, as a list of strings")
    return ExecProbe(argv=argv) if argv else None


def _http_probe(table: Table) -> HttpProbe | None:
    value = table.text_or_table("http")
    if value is None:
        return None
    if isinstance(value, str):
        return _http_from_url(table, value)
    host = _loopback(value.text("host"))
    _check_address(value, "host", host)
    return HttpProbe(
        port=value.integer("port") or 0,
        path=given(value.text("path"), "/"),
        host=host,
        status=given(value.integer("status"), 200),
        contains=given(value.text("contains"), ""),
    )


def _http_from_url(table: Table, url: str) -> HttpProbe | None:
    try:
        parts = urlsplit(url)
        host, port = _loopback(parts.hostname), parts.port or 80
    except ValueError:
        table.problem("http", f"expected a URL such as http://127.0.0.1:8000/, got {show(url)}")
        return None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if parts.username is not None or parts.fragment or not _REQUEST_PATH.fullmatch(path):
        table.problem("http", f"expected a URL such as http://127.0.0.1:8000/, got {show(url)}")
        return None
    _check_address(table, "http", host)
    return HttpProbe(port=port, path=path, host=host)


def _loopback(host: str | None) -> str:
    return "127.0.0.1" if host is None or host == "localhost" else host


def _check_address(table: Table, name: str, host: str) -> None:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        table.problem(
            name,
            f"expected an IPv4 address of the guest, or localhost, got {show(host)}",
            "the probe runs inside the guest and looks up no names",
        )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
