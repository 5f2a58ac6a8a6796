"""A Dockerfile whose locked image is nowhere any more is built again, late: only for a build."""

from smolbuild.build.context import BuildContext
from smolbuild.build.lockfile import replace_dockerfile
from smolbuild.build.plan import Plan, make_plan
from smolbuild.core.errors import UsageError
from smolbuild.core.events import Message
from smolbuild.model.lock import lock_path
from smolbuild.model.smolfile import Dockerfile
from smolbuild.source.base_disk import has_base
from smolbuild.source.docker_context import collect_context
from smolbuild.source.engine_image import build_dockerfile, engine_has

__all__ = ["with_image"]


def with_image(context: BuildContext, plan: Plan) -> Plan:
    """Return a plan whose base can be had: ``plan``, or a new one when its image is gone.

    An engine gives the same Dockerfile another ID each time that it cannot take every instruction
    from its cache, because an image has its time of making in it. The lock is then renewed, and the
    plan has another key.

    Raises:
        UsageError: the image is another one, and the plan's lock may not be renewed.
        HostError, BuildError: no engine answers, or it cannot build.

    """
    base, locked = plan.smolfile.base, plan.lock.lock.dockerfile
    if not isinstance(base, Dockerfile) or locked is None:
        return plan
    if has_base(locked.image, plan.shape.disk_bytes, cache=context.home.cache):
        return plan
    if engine_has(locked.image, context.docker):
        return plan
    text = f"the Docker engine does not have {locked.image[:19]}, which the lock names"
    context.emit(Message(level="info", text=f"{text}: {base.dockerfile} is built again"))
    files = collect_context(plan.smolfile, base, cache=context.home.cache)
    built = build_dockerfile(base, files, context.docker, context.emit)
    if built.image == locked.image:
        return plan
    name = lock_path(plan.smolfile.path).name
    if plan.locked:
        raise UsageError(
            f"--locked: {name} has {locked.image} for {base.dockerfile}, which no engine here has, "
            f"and building it again gave {built.image}",
            hint="push the image to a registry and name it in `image`, or build without --locked",
            code="lock-mismatch",
        )
    reason = f"{base.dockerfile} was built again: {locked.image[:19]} -> {built.image[:19]}"
    replace_dockerfile(context, plan.smolfile, plan.lock, built, reason)
    return make_plan(context, plan.smolfile.path)
