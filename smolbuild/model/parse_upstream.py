"""The upstream part of a Smolfile: smolvm's keys, read with smolvm's rules."""

from collections.abc import Mapping
from typing import Literal, cast

from smolbuild.core.values import dataclass
from smolbuild.model.parse_values import (
    given,
    read_cidrs,
    read_env,
    read_hosts,
    read_ports,
    read_secrets,
    read_timing,
    read_volumes,
)
from smolbuild.model.smolfile import ExecProbe, Health, Network, Restart, SecretSource
from smolbuild.model.tables import Table

__all__ = ["Upstream", "read_upstream"]

_MAX_BACKOFF = 300.0
_OUTSIDE = "not part of the artifact"
_FLAGS = {
    "gpu": "the machine has no GPU",
    "cuda": "the machine has no GPU",
    "auto_graph": "the machine has no GPU",
    "rosetta": "the machine runs the host's own architecture",
    "docker_socket": "no socket of the guest is put on the host",
    "stop_on_exit": "a fork is discarded when its command ends",
}
_VALUES = {
    "gpu_vram": "the machine has no GPU",
    "net_backend": "smolvm's choice of network backend",
    "block_io": "smolvm's choice of disk engine",
    "storage": "the machine has one disk, whose size is `overlay`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What the upstream keys say, ``[dev]`` and ``[artifact]`` applied."""

    image: str | None
    entrypoint: tuple[str, ...] | None
    cmd: tuple[str, ...] | None
    env: tuple[tuple[str, str], ...]
    imported_env: tuple[str, ...]
    workdir: str | None
    user: str | None
    cpus: int
    memory: int
    storage: int
    overlay: int
    ports: tuple[tuple[int, int], ...]
    volumes: tuple[str, ...]
    init: tuple[tuple[str, str], ...]
    """``(command, key)``."""
    network: Network
    ca_files: tuple[str, ...]
    health: Health | None
    restart: Restart
    secrets: Mapping[str, SecretSource]
    platform: str | None


def read_upstream(root: Table, *, use_dev: bool, environment: Mapping[str, str]) -> Upstream:
    """Read the top level of a Smolfile; problems and notices go to the table's report."""
    dev = _Dev(root, use_dev=use_dev)
    artifact = _artifact(root)
    entries = [*root.listed("env"), *dev.env]
    env, imported = read_env(root.report, entries, environment)
    cpus, memory = given(root.integer("cpus"), 4), given(root.integer("memory"), 8192)
    entrypoint, cmd = root.texts("entrypoint"), root.texts("cmd")
    if artifact:
        cpus, memory = (
            given(artifact.integer("cpus"), cpus),
            given(artifact.integer("memory"), memory),
        )
        entrypoint = artifact.texts("entrypoint") or entrypoint
        cmd = artifact.texts("cmd") or cmd
    if cpus > 16:
        root.report.notice("cpus", "more than 16 virtual CPUs: few hosts have that many")
    _notice_outside(root)
    return Upstream(
        image=root.text("image"),
        entrypoint=entrypoint or None,
        cmd=cmd or None,
        env=env,
        imported_env=imported,
        workdir=dev.workdir or root.text("workdir"),
        user=dev.user or root.text("user"),
        cpus=cpus,
        memory=memory,
        storage=given(root.integer("storage"), 20),
        overlay=given(root.integer("overlay"), 10),
        ports=dev.ports or read_ports(root, "ports"),
        volumes=dev.volumes or read_volumes(root, "volumes"),
        init=dev.init or root.listed("init"),
        network=_network(root),
        ca_files=_ca_files(root),
        health=_health(root),
        restart=_restart(root),
        secrets=read_secrets(root),
        platform=artifact.text("oci_platform") if artifact else None,
    )


class _Dev:
    """The ``[dev]`` profile: empty unless it is asked for, but always checked."""

    def __init__(self, root: Table, *, use_dev: bool) -> None:
        table = root.table("dev")
        self.env: tuple[tuple[str, str], ...] = ()
        self.init: tuple[tuple[str, str], ...] = ()
        self.workdir: str | None = None
        self.user: str | None = None
        self.ports: tuple[tuple[int, int], ...] = ()
        self.volumes: tuple[str, ...] = ()
        if table is None:
            return
        env, init = table.listed("env"), table.listed("init")
        workdir, user = table.text("workdir"), table.text("user")
        ports, volumes = read_ports(table, "ports"), read_volumes(table, "volumes")
        if use_dev:
            self.env, self.init, self.workdir, self.user = env, init, workdir, user
            self.ports, self.volumes = ports, volumes
            for name in ("ports", "volumes"):
                if table.has(name):
                    _notice_at_run(table, name)
        else:
            self._notice_unused(table, init)

    def _notice_unused(self, table: Table, init: tuple[tuple[str, str], ...]) -> None:
        if init:
            table.report.notice(
                table.at("init"),
                "[dev].init is NOT run: smolvm never packs [dev]. If the environment needs these "
                f"{len(init)} command(s), set `smolbuild.use_dev = true`, or move them to `init`",
                loud=True,
            )
        for name in ("env", "workdir", "user", "ports", "volumes"):
            if table.has(name):
                table.report.notice(
                    table.at(name), f"{_OUTSIDE}: [dev] needs `smolbuild.use_dev = true`"
                )


def _artifact(root: Table) -> Table | None:
    artifact, pack = root.table("artifact"), root.table("pack")
    if artifact and pack:
        root.report.notice("pack", "[artifact] is there too and wins; [pack] is not used")
        _check_artifact(pack)
    return artifact or pack


def _check_artifact(table: Table) -> None:
    table.integer("cpus")
    table.integer("memory")
    table.texts("entrypoint")
    table.texts("cmd")
    table.text("oci_platform")


def _network(root: Table) -> Network:
    net = root.flag("net") or False
    table = root.table("network")
    if table is None:
        return Network(mode="full" if net else "off")
    hosts = read_hosts(table, "allow_hosts")
    patterns = read_hosts(table, "allow_host_patterns", patterns=True)
    cidrs = read_cidrs(table, "allow_cidrs")
    credentials = table.tables("credentials")
    for binding in credentials:
        binding.text("name")
        binding.text("environment_variable")
        binding.texts("allowed_hosts")
        binding.texts("methods")
    if credentials:
        table.report.notice(
            table.at("credentials"), f"{_OUTSIDE}: smolvm substitutes them on the host"
        )
    if hosts or patterns or cidrs:
        return Network(
            mode="allow", allow_hosts=hosts, allow_host_patterns=patterns, allow_cidrs=cidrs
        )
    return Network(mode="full" if net or credentials else "off")


def _ca_files(root: Table) -> tuple[str, ...]:
    table = root.table("network")
    return () if table is None else table.texts("ca_files")


def _health(root: Table) -> Health | None:
    table = root.table("health")
    if table is None:
        return None
    argv = table.texts("exec")
    if not argv:
        root.report.notice("health", "[health] without exec checks nothing")
    return read_timing(table, ExecProbe(argv=argv) if argv else None)


def _restart(root: Table) -> Restart:
    table = root.table("restart")
    if table is None:
        return Restart()
    policy = given(table.text("policy"), "never")
    return Restart(
        policy=cast('Literal["never", "always", "on-failure", "unless-stopped"]', policy),
        max_retries=given(table.integer("max_retries"), 0),
        max_backoff=min(given(table.duration("max_backoff"), _MAX_BACKOFF), _MAX_BACKOFF),
    )


def _notice_outside(root: Table) -> None:
    report = root.report
    for name, why in _FLAGS.items():
        if root.flag(name):
            report.notice(name, f"{_OUTSIDE}: {why}")
    for name in ("net_backend", "block_io"):
        root.text(name)
    root.integer("gpu_vram")
    for name, why in _VALUES.items():
        if root.has(name):
            report.notice(name, f"{_OUTSIDE}: {why}")
    for name in ("ports", "volumes"):
        if root.has(name):
            _notice_at_run(root, name)
    _notice_tables(root)
    _notice_branch(root)


def _notice_tables(root: Table) -> None:
    report = root.report
    auth = root.table("auth")
    if auth and auth.flag("ssh_agent"):
        report.notice("auth.ssh_agent", f"{_OUTSIDE}: no agent of the host reaches the guest")
    service = root.table("service")
    if service:
        service.integer("port")
        service.integer("listen")
        service.text("protocol")
        report.notice("service", f"{_OUTSIDE}: metadata that smolvm itself does not read")
    if root.has("restart"):
        report.notice("restart", f"{_OUTSIDE}: a failed fork is discarded, never restarted")


def _notice_at_run(table: Table, name: str) -> None:
    table.report.notice(table.at(name), f"{_OUTSIDE}, and not yet applied by `smolbuild run`")


def _notice_branch(root: Table) -> None:
    if root.has("branch") and root.has("fork"):
        root.problem("fork", "[branch] is there too; they are two names of one table")
    cuda = root.flag("cuda") or root.flag("auto_graph")
    for name in ("branch", "fork"):
        table = root.table(name)
        if table is None:
            continue
        table.flag("enabled")
        size, limit = table.integer("pool_size"), table.integer("cuda_vram_limit_mib")
        if size is not None and not cuda:
            table.problem("pool_size", "pool_size needs cuda = true or auto_graph = true")
        if limit is not None and size is None:
            table.problem("cuda_vram_limit_mib", "cuda_vram_limit_mib needs pool_size")
        root.report.notice(name, f"{_OUTSIDE}: every smolbuild artifact can be forked")
