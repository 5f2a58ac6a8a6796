"""``smolbuild plan`` and ``lock``."""

from pathlib import Path

import click

from smolbuild.build.cache import StepCache
from smolbuild.build.context import BuildContext
from smolbuild.build.lockfile import obtain_lock, update_lock
from smolbuild.build.plan import Plan, make_plan
from smolbuild.build.planned import PlannedStep, planned_steps
from smolbuild.cli import render
from smolbuild.cli.context import build_context
from smolbuild.cli.describe import print_table, short
from smolbuild.cli.options import (
    cache_options,
    drift_option,
    file_options,
    json_option,
    print_json,
    progress_option,
    smolfile_path,
)
from smolbuild.cli.policy import policy_json, policy_lines
from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError
from smolbuild.model.lock import Lock, lock_path
from smolbuild.model.parse import parse_smolfile

__all__ = ["lock", "plan"]


@click.command(
    epilog="""\b
Examples:
  smolbuild plan --json
  smolbuild plan --against notes:v1
  smolbuild plan --remote --check-drift
""",
)
@file_options
@click.option("--locked", is_flag=True, help="Fail if Smolfile.lock is missing or does not fit.")
@click.option(
    "--against",
    metavar="NAME|DIGEST",
    default=None,
    help="Compare with this local artifact.  [default: the last build of the same name]",
)
@drift_option
@click.option("--remote", is_flag=True, help="Say whether the remote cache has the artifact.")
@cache_options
@json_option
@progress_option
def plan(
    *,
    file: Path | None,
    directory: Path | None,
    locked: bool,
    against: str | None,
    check_drift: bool,
    remote: bool,
    cache_registry: str | None,
    as_json: bool,
    progress: str,
) -> None:
    """Show the provenance key, the lock, every input with its digest, and what would run and why.

    Each change since the last build is named to the leaf, with the steps that run again for it.
    Starts no machine. Smolfile.lock is written when it is missing or does not fit.
    """
    with render.progress(progress) as emit, build_context(emit) as context:
        made = make_plan(
            context,
            smolfile_path(file, directory),
            locked=locked,
            check_drift=check_drift,
            against=against,
        )
        steps = planned_steps(made, StepCache(context.home.cache))
        there = _remote(context, made, cache_registry) if remote else None
    if as_json:
        print_json(plan_json(made, steps, there))
        return
    click.echo(f"key      {made.key}")
    click.echo(f"lock     {made.lock.state}")
    click.echo(f"artifact {_existing(made) or 'would be built'}")
    for label, text in policy_lines(made, there):
        click.echo(f"{label:<8} {text}")
    click.echo("\ninputs")
    print_table(
        [("  INPUT", "DIGEST")]
        + [(f"  {name}", short(item.digest)) for name, item in made.tree.leaves.items()]
    )
    if made.smolfile.steps:
        click.echo("\nsteps")
        print_table(
            [("  STEP", "STATE", "WHY")]
            + [
                (f"  {step.name}", "cached" if step.cached else "will run", step.reason)
                for step in steps
            ]
        )
    if made.changes is not None and (made.changes or against):
        from smolbuild.cli.changes import print_changes

        print_changes(made, steps, against)


@click.command(epilog="Example:  smolbuild lock --update")
@file_options
@click.option("--update", is_flag=True, help="Resolve everything anew, also what is locked.")
@json_option
@progress_option
def lock(
    *, file: Path | None, directory: Path | None, update: bool, as_json: bool, progress: str
) -> None:
    """Pin base image, Debian packages and kernel in Smolfile.lock."""
    with render.progress(progress) as emit, build_context(emit) as context:
        path = smolfile_path(file, directory)
        smolfile = parse_smolfile(path, environment=context.environment)
        if update:
            state = update_lock(context, smolfile)
        else:
            state = obtain_lock(context, smolfile, locked=False)
    target = lock_path(smolfile.path)
    if as_json:
        print_json(
            {"path": str(target), "state": state.state, "reasons": list(state.reasons)}
            | _lock_json(state.lock)
        )
        return
    click.echo(f"{target.name}: {state.state}")
    for key, text in _lock_lines(state.lock):
        click.echo(f"  {key:<7} {text}")


def _existing(made: Plan) -> Digest | None:
    return made.existing.index.descriptor.digest if made.existing else None


def _remote(context: BuildContext, made: Plan, registry: str | None) -> str:
    from smolbuild.build.remote import choose_cache, has_artifact

    remote = choose_cache(made.smolfile.cache, context.environment, registry=registry, push=None)
    if remote is None:
        raise UsageError(
            "there is no remote cache to ask",
            hint="name one with --cache-registry or [smolbuild.cache] registry",
            code="cache-registry",
        )
    return has_artifact(context, made, remote)


def plan_json(
    made: Plan, steps: tuple[PlannedStep, ...], remote: str | None = None
) -> dict[str, object]:
    """Return the JSON of ``smolbuild plan``."""
    return {
        "name": made.name,
        "key": made.key,
        "artifact": _existing(made),
        "lock": {"state": made.lock.state, "reasons": list(made.lock.reasons)},
        **policy_json(made, remote),
        "inputs": [
            {"name": name, "digest": item.digest, "value": item.value}
            for name, item in made.tree.leaves.items()
        ],
        "steps": [
            {
                "name": step.name,
                "chainKey": step.chain_key,
                "state": "cached" if step.cached else "will run",
                "why": step.reason,
            }
            for step in steps
        ],
        "against": made.compared,
        "changes": _changes_json(made, steps),
        "notices": [
            {"key": n.key, "line": n.line, "text": n.text, "loud": n.loud}
            for n in made.smolfile.notices
        ],
    }


def _changes_json(made: Plan, steps: tuple[PlannedStep, ...]) -> list[dict[str, object]] | None:
    if not made.changes:
        return None if made.changes is None else []
    from smolbuild.build.explain import changes_json, steps_to_run

    return changes_json(made.changes, steps_to_run(steps))


def _lock_json(value: Lock) -> dict[str, object]:
    return {
        "image": None
        if value.image is None
        else {"reference": value.image.reference, "digest": value.image.digest},
        "packages": 0 if value.debian is None else len(value.debian.packages),
        "kernel": None
        if value.kernel is None
        else {"package": value.kernel.package, "version": value.kernel.version},
    }


def _lock_lines(value: Lock) -> list[tuple[str, str]]:
    lines = []
    if value.image is not None:
        lines.append(("image", f"{value.image.reference} {value.image.digest}"))
    if value.debian is not None:
        lines.append(("debian", f"{value.debian.suite}, {len(value.debian.packages)} packages"))
    if value.kernel is not None:
        lines.append(("kernel", f"{value.kernel.package} {value.kernel.version}"))
    return lines
