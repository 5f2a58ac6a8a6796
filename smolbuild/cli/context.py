"""The real world for a command: store, engine, registries."""

import contextlib
import os
from collections.abc import Iterator

from smolbuild.build.context import BuildContext
from smolbuild.cli.options import home
from smolbuild.core.events import Emit
from smolbuild.machine.qemu import QemuEngine
from smolbuild.registry.images import RegistryImages
from smolbuild.store.layout import Store

__all__ = ["build_context"]


@contextlib.contextmanager
def build_context(emit: Emit) -> Iterator[BuildContext]:
    """Give the context of a build command."""
    place = home()
    with contextlib.closing(RegistryImages(os.environ, emit=emit)) as images:
        yield BuildContext(
            home=place,
            store=Store(place.store),
            engine=QemuEngine(place, emit=emit),
            fetcher=images,
            environment=os.environ,
            emit=emit,
        )
