"""How commands run in the machine: the image's configuration under the Smolfile's overrides."""

from smolbuild.model.artifact import RunConfig
from smolbuild.model.environment import merge_env
from smolbuild.model.smolfile import Service, Smolfile
from smolbuild.source.image_config import ImageConfig

__all__ = ["MAIN_SERVICE", "run_config", "services_of"]

MAIN_SERVICE = "main"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run_config(smolfile: Smolfile, image: ImageConfig) -> RunConfig:
    """Merge ``image`` and ``smolfile`` as container engines do.

    An entrypoint in the Smolfile drops the image's cmd; a Smolfile's cmd replaces the image's.
    """
    if smolfile.cmd is not None:
        cmd = smolfile.cmd
    else:
        cmd = image.cmd if smolfile.entrypoint is None else ()
    return RunConfig(
        env=merge_env((("PATH", _DEFAULT_PATH),), image.env, smolfile.env),
        workdir=smolfile.workdir or image.workdir or "/",
        user=smolfile.user or image.user or "root",
        entrypoint=image.entrypoint if smolfile.entrypoint is None else smolfile.entrypoint,
        cmd=cmd,
        ports=smolfile.ports,
        volumes=smolfile.volumes,
    )


def services_of(smolfile: Smolfile, run: RunConfig) -> tuple[Service, ...]:
    """Return what must be alive in the checkpoint.

    A Smolfile that declares a health check but no service (upstream has no services) gets its
    entrypoint and cmd as the service ``main``: there would be nothing to be healthy otherwise.
    """
    argv = run.entrypoint + run.cmd
    if smolfile.services or smolfile.health is None or not argv:
        return smolfile.services
    import shlex

    return (Service(name=MAIN_SERVICE, run="exec " + shlex.join(argv)),)
