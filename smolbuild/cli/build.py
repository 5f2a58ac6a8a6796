"""``smolbuild build``."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.plan import Plan, make_plan
from smolbuild.build.result import BuildResult, reuse
from smolbuild.build.undeclared import heed_known
from smolbuild.cli import render
from smolbuild.cli.context import build_context
from smolbuild.cli.describe import sizes_of
from smolbuild.cli.options import (
    cache_options,
    drift_option,
    file_options,
    has_person,
    json_option,
    print_json,
    progress_option,
    smolfile_path,
)
from smolbuild.cli.render.words import duration
from smolbuild.core.codec import encode
from smolbuild.core.errors import SmolbuildError, UsageError
from smolbuild.core.events import Emit, Message
from smolbuild.core.values import dataclass
from smolbuild.model.reference import local_name, parse_reference

if TYPE_CHECKING:
    from smolbuild.build.kept import Failed
    from smolbuild.machine.base import Machine

    _Keep = Callable[[BuildContext, Machine, Failed], None]
    from smolbuild.build.remote import RemoteCache

__all__ = ["build"]

_HOW = {
    "built": "built, proven and signed",
    "local": "reused (nothing changed)",
    "remote": "from the remote cache, verified",
}


@click.command(
    epilog="""\b
Examples:
  smolbuild build
  smolbuild build -C examples/notes-service -t notes:v1
  smolbuild build --watch
  smolbuild build --debug-on-failure
  smolbuild build --locked --push registry.example.com/team/notes:v1
  smolbuild build --cache-registry registry.example.com/team/env --cache-push
""",
)
@file_options
@click.option("-t", "--tag", "tags", multiple=True, metavar="NAME[:TAG]", help="Local name.")
@click.option("--push", "push_to", metavar="REF", default=None, help="Push the result to REF.")
@click.option("--locked", is_flag=True, help="Fail if Smolfile.lock is missing or does not fit.")
@drift_option
@click.option("--no-cache", is_flag=True, help="Run every step and build anew.")
@cache_options
@click.option(
    "--cache-push/--no-cache-push",
    default=None,
    help="Publish what was built to the remote cache.  [default: SMOLBUILD_CACHE_PUSH, "
    "then [smolbuild.cache] push]",
)
@click.option(
    "--key",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="Sign with this private key.  [default: the home's key, made on first use]",
)
@click.option("--watch", is_flag=True, help="Build again whenever a declared input changes.")
@click.option(
    "--debug-on-failure",
    is_flag=True,
    help="When a step or a service fails, open a shell in a copy of the machine; without a "
    "terminal, keep the machine for `smolbuild debug`.",
)
@json_option
@progress_option
def build(
    *,
    file: Path | None,
    directory: Path | None,
    watch: bool,
    debug_on_failure: bool,
    progress: str,
    **options: Any,
) -> int:
    """Build, prove, sign and name the artifact that a Smolfile declares.

    When an artifact with the same provenance key is there already, nothing is built: it is taken
    from the local store, or pulled from the remote cache and verified.
    """
    path = smolfile_path(file, directory)
    wish = _Wish(path=path, progress=progress, **options)
    if watch:
        if wish.as_json or debug_on_failure:
            raise UsageError(
                "--watch builds until it is stopped, and takes neither --json nor "
                "--debug-on-failure",
            )
        from smolbuild.cli.watch import watch_builds

        watch_builds(path, os.environ, lambda: _once(wish), progress)
    if has_person(os.environ) and not wish.as_json and progress in {"auto", "plain"}:
        from smolbuild.cli.failing import build_with_person

        return build_with_person(
            lambda keeper: _once(wish, keeper.keep), os.environ, shell=debug_on_failure
        )
    if debug_on_failure:
        from smolbuild.cli.failing import on_disk

        _once(wish, on_disk)
    else:
        _once(wish)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What the command line asks for."""

    path: Path
    tags: tuple[str, ...]
    push_to: str | None
    locked: bool
    check_drift: bool
    no_cache: bool
    cache_registry: str | None
    cache_push: bool | None
    key: Path | None
    as_json: bool
    progress: str


def _once(wish: _Wish, keep: "_Keep | None" = None) -> None:
    with render.progress(wish.progress) as emit, _context(emit, keep) as context:
        phases = Phases(emit)
        with phases.phase("resolve", "resolving inputs"):
            plan = make_plan(context, wish.path, locked=wish.locked, check_drift=wish.check_drift)
        _say_notices(plan, emit)
        heed_known(plan, emit)
        names = _names(plan, wish.tags)
        remote = _remote(context, plan, wish.cache_registry, wish.cache_push)
        result = None if wish.no_cache else reuse(context, plan, names)
        why = None
        if result is None:
            why = _why(context, plan, no_cache=wish.no_cache)
            result = _build(context, plan, names, phases, wish, remote)
            plan = result.plan or plan
        elif wish.key is not None:
            _sign_too(context, result, wish.key)
        if remote is not None and remote.push:
            result = _fill(context, plan, result, remote, phases, renew=wish.no_cache)
        pushed = None
        if wish.push_to is not None:
            result, pushed = _push(context, plan, result, wish.push_to, phases, renew=wish.no_cache)
    _report(result, plan, pushed, phases, why, as_json=wish.as_json)


@contextlib.contextmanager
def _context(emit: Emit, keep: "_Keep | None") -> Iterator[BuildContext]:
    with build_context(emit) as context:
        if keep is None:
            yield context
        else:
            yield dataclasses.replace(context, on_failure=functools.partial(keep, context))


def _build(
    context: BuildContext,
    plan: Plan,
    names: tuple[str, ...],
    phases: Phases,
    wish: _Wish,
    remote: "RemoteCache | None",
) -> BuildResult:
    # Nothing changed is the common case, and needs neither of these.
    from smolbuild.build.builder import build as build_anew
    from smolbuild.trust.keyring import obtain_signer

    signer = obtain_signer(context.home, wish.key, context.emit)
    return build_anew(context, plan, signer, names, phases, no_cache=wish.no_cache, remote=remote)


def _remote(
    context: BuildContext, plan: Plan, registry: str | None, push: bool | None
) -> "RemoteCache | None":
    names = ("SMOLBUILD_CACHE_REGISTRY", "SMOLBUILD_CACHE_PUSH")
    asked = registry or push or plan.smolfile.cache.registry
    if not asked and not any(context.environment.get(name) for name in names):
        return None  # the transport need not be loaded
    from smolbuild.build.remote import choose_cache

    return choose_cache(plan.smolfile.cache, context.environment, registry=registry, push=push)


def _fill(
    context: BuildContext,
    plan: Plan,
    result: BuildResult,
    remote: "RemoteCache",
    phases: Phases,
    *,
    renew: bool,
) -> BuildResult:
    """Publish to the remote cache; a cache that fails is a warning, the build stands."""
    from smolbuild.build.remote import share

    if result.origin == "remote":
        return result
    name = remote.repository.name
    with phases.phase("cache-push", f"publishing to the remote cache {name}"):
        try:
            return share(context, plan, result, remote.repository, renew=renew, optional=True)[0]
        except SmolbuildError as error:
            text = f"not published to the remote cache {name}: {error.message}"
            context.emit(Message(level="warning", text=text))
            return result


def _sign_too(context: BuildContext, result: BuildResult, key: Path) -> None:
    """Sign what was built before, perhaps under another key, with the key that is asked for."""
    from smolbuild.build.sign import add_signature
    from smolbuild.trust.keyring import obtain_signer

    signer = obtain_signer(context.home, key, context.emit)
    with context.store.lease():
        if add_signature(context.store, result.artifact, signer, now=context.now()):
            text = f"signed with the key {signer.public.fingerprint}, too"
            context.emit(Message(level="info", text=text))


def _push(
    context: BuildContext,
    plan: Plan,
    result: BuildResult,
    reference: str,
    phases: Phases,
    *,
    renew: bool,
) -> tuple[BuildResult, dict[str, object]]:
    from smolbuild.build.remote import share
    from smolbuild.cli.registry import push_to

    target = parse_reference(reference)
    with phases.phase("push", f"pushing to {reference}"):
        result, sent = share(context, plan, result, target, renew=renew)
        done = push_to(context.store, result.names[0], reference, context.emit)
    return result, {
        "reference": str(done.reference),
        "digest": done.digest,
        "bytes_pushed": done.bytes_pushed + sent,
    }


def _why(context: BuildContext, plan: Plan, *, no_cache: bool) -> dict[str, object]:
    from smolbuild.build.cache import StepCache
    from smolbuild.cli.changes import say_why, why_json

    reason = say_why(plan, context.emit, no_cache=no_cache)
    return why_json(plan, StepCache(context.home.cache), reason)


def _names(plan: Plan, tags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(local_name(tag) for tag in tags or (plan.name,))


def _say_notices(plan: Plan, emit: Emit) -> None:
    if plan.age is not None and plan.age.is_over:
        emit(Message(level="info", text=f"the artifact of this key is rebuilt: {plan.age}"))
    for notice in plan.smolfile.notices:
        if notice.undeclared:
            continue  # what the policy makes of it is said
        file = Path(notice.file or plan.smolfile.path).name  # a sibling smolbuild.toml, perhaps
        where = f"{file}:{notice.line}: " if notice.line else ""
        emit(
            Message(
                level="warning" if notice.loud else "info",
                text=f"{where}{notice.key}: {notice.text}",
            )
        )


def _report(
    result: BuildResult,
    plan: Plan,
    pushed: dict[str, object] | None,
    phases: Phases,
    why: dict[str, object] | None,
    *,
    as_json: bool,
) -> None:
    artifact = result.artifact
    sizes = sizes_of(artifact)
    if as_json:
        print_json(
            {
                "name": result.names[0],
                "names": list(result.names),
                "key": artifact.config.key,
                "digest": artifact.index.descriptor.digest,
                "manifest": artifact.manifest.descriptor.digest,
                "reused": result.reused,
                "origin": result.origin,
                "why": why,
                "sizes": sizes,
                "phases": dict(phases.seconds),
                "seconds": phases.total(),
                "health": artifact.config.results.health,
                "proofs": encode(result.proofs),
                "lock": plan.lock.state,
                "pushed": pushed,
            }
        )
        return
    click.echo(f"{result.names[0]}: {_HOW[result.origin]}")
    click.echo(f"digest {artifact.index.descriptor.digest}")
    click.echo(f"key    {artifact.config.key}")
    if not result.reused:
        took = ", ".join(f"{name} {duration(each)}" for name, each in phases.seconds.items())
        click.echo(
            f"sizes  disk {sizes['disk'] / 1e6:.0f} MB, memory {sizes['memory'] / 1e6:.0f} "
            f"MB, packed {sizes['packed'] / 1e6:.1f} MB"
        )
        click.echo(f"time   {duration(phases.total())}: {took}")
