"""The real world for a command: store, engine, registries."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from smolbuild.build.context import BuildContext
from smolbuild.cli.options import home
from smolbuild.core.events import Emit
from smolbuild.core.home import Home
from smolbuild.machine.accel import host_contract
from smolbuild.registry.images import RegistryImages
from smolbuild.source.docker_client import DockerClient
from smolbuild.store.layout import Store

if TYPE_CHECKING:
    from smolbuild.machine.base import Engine

__all__ = ["build_context"]


@contextlib.contextmanager
def build_context(emit: Emit) -> Iterator[BuildContext]:
    """Give the context of a build command."""
    place = home()
    with (
        contextlib.closing(RegistryImages(os.environ, emit=emit)) as images,
        contextlib.closing(DockerClient(os.environ)) as docker,
    ):
        yield BuildContext(
            home=place,
            store=Store(place.store),
            contract=functools.partial(host_contract, place),
            open_engine=functools.cache(functools.partial(_engine, place, emit)),
            fetcher=images,
            docker=docker,
            environment=os.environ,
            emit=emit,
        )


def _engine(place: Home, emit: Emit) -> "Engine":
    from smolbuild.machine.qemu import QemuEngine

    return QemuEngine(place, emit=emit)
