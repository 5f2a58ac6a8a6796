"""The ``[smolbuild]`` part of a Smolfile, wherever it stands."""

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Literal, cast

from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.parse_values import (
    check_hosts,
    given,
    inside,
    read_env,
    read_probe,
    read_secrets,
    read_timing,
)
from smolbuild.model.reference import parse_repository
from smolbuild.model.smolfile import (
    Base,
    CachePolicy,
    Copy,
    Dockerfile,
    Health,
    Policy,
    RestoreContract,
    Scrub,
    SecretSource,
    Service,
    Step,
)
from smolbuild.model.tables import Table

__all__ = ["Ours", "read_smolbuild"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """What ``[smolbuild]`` says; its defaults when there is none."""

    name: str | None = None
    use_dev: bool = False
    resume: Literal["memory", "disk"] = "memory"
    kernel: str | None = None
    base: Base | Dockerfile | None = None
    copy: tuple[Copy, ...] = ()
    steps: tuple[Step, ...] = ()
    services: tuple[Service, ...] = ()
    health: Health | None = None
    restore: RestoreContract = field(default_factory=RestoreContract)
    policy: Policy = field(default_factory=Policy)
    cache: CachePolicy = field(default_factory=CachePolicy)
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)
    scrub: Scrub = field(default_factory=Scrub)


def read_smolbuild(table: Table | None, environment: Mapping[str, str]) -> Ours:
    """Read the table; problems and notices go to its report."""
    if table is None:
        return Ours()
    health = table.table("health")
    ours = Ours(
        name=table.text("name"),
        use_dev=table.flag("use_dev") or False,
        resume=cast('Literal["memory", "disk"]', given(table.text("resume"), "memory")),
        kernel=table.text("kernel"),
        base=_base(table.table("base")),
        copy=tuple(_copies(table)),
        steps=tuple(_steps(table.tables("step"), environment)),
        services=tuple(_services(table.tables("service"), environment)),
        health=read_timing(health, read_probe(health)) if health else None,
        restore=_restore(table.table("restore")),
        policy=_policy(table.table("policy")),
        cache=_cache(table.table("cache")),
        secrets=read_secrets(table, command=True),
        scrub=_scrub(table.table("scrub")),
    )
    _notice_unheeded(table, ours)
    return ours


def _notice_unheeded(table: Table, ours: Ours) -> None:
    """Say of what is asked for and not yet done that it is not done: silence would be a lie."""
    asked = {
        "restore.hold": ours.restore.hold,
        "policy.max_ready_ms": ours.policy.max_ready_ms is not None,
    }
    for path, is_asked in asked.items():
        inner, _, key = path.rpartition(".")
        holder = table.table(inner) if inner else table
        if is_asked and holder is not None:
            holder.report.notice(
                holder.at(key),
                "accepted, but this version of smolbuild does NOT act on it",
                loud=True,
            )


_OF_DEBIAN = ("packages", "variant", "mirror", "components")
_OF_DOCKERFILE = ("target", "args", "context")
_SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "APIKEY", "API_KEY")


def _base(table: Table | None) -> Base | Dockerfile | None:
    if table is None:
        return None
    if table.has("debian") == table.has("dockerfile"):
        both = table.has("debian")
        table.report.problem(
            table.at("dockerfile") if both else table.path,
            "debian and dockerfile are both there" if both else "debian is missing, or dockerfile",
            "keep one of the two" if both else 'debian = "bookworm", or dockerfile = "Dockerfile"',
        )
    kind, others = ("debian", _OF_DOCKERFILE) if table.has("debian") else ("dockerfile", _OF_DEBIAN)
    for name in others if table.has(kind) else ():
        if table.has(name):
            table.problem(name, f"it means nothing beside {kind}", f"take {name} out")
    dockerfile, debian = _dockerfile(table), _debian(table)  # both, for all their problems
    return dockerfile if table.has("dockerfile") else debian


def _dockerfile(table: Table) -> Dockerfile | None:
    path, context = table.text("dockerfile"), given(table.text("context"), ".")
    args = table.named_texts("args")
    for name in args:
        if any(word in name.upper() for word in _SECRET_WORDS):
            table.report.notice(
                table.at("args"),
                f"{name} looks like a secret: a build argument stays readable in the image, in the "
                "lock and in the artifact",
                loud=True,
            )
    found = None if path is None else inside(table.report, table.at("dockerfile"), path)
    directory = inside(table.report, table.at("context"), context)
    if found is None or directory is None:
        return None
    return Dockerfile(
        dockerfile=found,
        target=table.text("target"),
        args=tuple(sorted(args.items())),
        context=directory,
    )


def _debian(table: Table) -> Base:
    usual = Base(debian="")
    mirror, snapshot = table.text("mirror"), table.text("snapshot")
    dated = table.has("snapshot")
    if dated != ("{snapshot}" in (mirror or "")):
        where, what = ("snapshot", "mirror") if dated else ("mirror", "snapshot")
        example = 'mirror = "https://snapshot.example.com/debian/{snapshot}"'
        table.problem(where, f"it does not go with {what}", f"write {example} and the date")
    return Base(
        debian=given(table.text("debian"), ""),
        packages=table.texts("packages"),
        variant=given(table.text("variant"), usual.variant),
        mirror=mirror,
        snapshot=snapshot,
        components=table.texts("components") or usual.components,
    )


def _copies(table: Table) -> Iterator[Copy]:
    for entry in table.tables("copy"):
        source, to, mode = entry.text("from"), entry.text("to"), entry.text("mode")
        owner = entry.text("owner")
        relative = None if source is None else inside(entry.report, entry.at("from"), source)
        if to is not None and ".." in to.split("/"):
            entry.problem("to", "expected a path in the guest without ..")
        if relative is not None and to is not None:
            yield Copy(
                source=relative,
                to=_target(to),
                mode=None if mode is None else int(mode, 8),
                owner=owner,
                key=entry.origin("from"),
            )


def _target(path: str) -> str:
    # POSIX lets two leading slashes mean something else; a guest path never does.
    normal = "/" + posixpath.normpath(path).lstrip("/")
    return normal + "/" if path.endswith("/") and normal != "/" else normal


def _steps(tables: Iterable[Table], environment: Mapping[str, str]) -> Iterator[Step]:
    usual = Step(name="", run="")
    for number, table in enumerate(tables, start=1):
        env, _ = read_env(table.report, table.listed("env"), environment)
        inputs = (inside(table.report, key, path) for path, key in table.listed("inputs"))
        timeout = given(table.duration("timeout"), usual.timeout)
        if not timeout:
            table.problem("timeout", "expected a time above zero")
        yield Step(
            name=given(table.text("name"), f"step-{number}"),
            run=given(table.text("run"), ""),
            line=table.report.line(table.path),
            key=table.report.prefix + table.path,
            inputs=tuple(path for path in inputs if path is not None),
            copy=tuple(_copies(table)),
            env=env,
            workdir=table.text("workdir"),
            user=table.text("user"),
            network=_step_network(table),
            secrets=table.texts("secrets"),
            timeout=timeout,
        )


def _step_network(table: Table) -> bool | tuple[str, ...] | None:
    value = table.flag_or_listed("network")
    return check_hosts(table.report, value) if isinstance(value, tuple) else value


def _services(tables: Iterable[Table], environment: Mapping[str, str]) -> Iterator[Service]:
    usual = Service(name="", run="")
    for table in tables:
        env, _ = read_env(table.report, table.listed("env"), environment)
        ready = table.table("ready")
        timeout = given(table.duration("ready_timeout"), usual.ready_timeout)
        if not timeout:
            table.problem("ready_timeout", "expected a time above zero")
        yield Service(
            name=given(table.text("name"), ""),
            run=given(table.text("run"), ""),
            line=table.report.line(table.path),
            key=table.report.prefix + table.path,
            ready=read_probe(ready) if ready else None,
            ready_timeout=timeout,
            env=env,
            workdir=table.text("workdir"),
            user=table.text("user"),
        )


def _restore(table: Table | None) -> RestoreContract:
    if table is None:
        return RestoreContract()
    usual = RestoreContract()
    regenerate = tuple(dict.fromkeys(table.texts("regenerate")))
    return RestoreContract(
        regenerate=regenerate if table.has("regenerate") else usual.regenerate,
        run=table.texts("run"),
        hold=table.flag("hold") or False,
    )


def _scrub(table: Table | None) -> Scrub:
    if table is None:
        return Scrub()
    return Scrub(
        run=table.texts("run") if table.has("run") else None,
        allow=tuple(dict.fromkeys(table.texts("allow"))),
    )


def _policy(table: Table | None) -> Policy:
    if table is None:
        return Policy()
    drift = table.text("on_base_drift")
    return Policy(
        max_age=table.duration("max_age"),
        on_base_drift=cast('Literal["rebuild", "warn", "fail"] | None', drift),
        undeclared=cast('Literal["warn", "fail"]', given(table.text("undeclared"), "warn")),
        max_ready_ms=table.integer("max_ready_ms"),
    )


def _cache(table: Table | None) -> CachePolicy:
    if table is None:
        return CachePolicy()
    registry = table.text("registry")
    if registry is not None:
        try:
            parse_repository(registry)
        except UsageError as error:
            table.problem("registry", error.message)
    return CachePolicy(
        max_size=given(table.size("max_size"), CachePolicy().max_size),
        registry=registry,
        push=table.flag("push") or False,
    )
