"""The layers of an image, checked and merged into one file tree."""

import contextlib
from pathlib import Path

from smolbuild.core.errors import VerificationError
from smolbuild.core.events import Emit, Message
from smolbuild.source.content import verify_region
from smolbuild.source.image import LoadedImage
from smolbuild.source.layers import apply_layer
from smolbuild.source.tree import Tree
from smolbuild.source.unpack import unpacked

__all__ = ["merge"]


def merge(image: LoadedImage, work: Path, resources: contextlib.ExitStack, emit: Emit) -> Tree:
    """Return the merged file tree of ``image``; what it refers to stays open in ``resources``.

    Every layer's blob digest and diff id are checked before the first of its entries is looked at.

    Args:
        image: what to merge.
        work: directory for decompressed layers (unnamed files).
        resources: closes them.
        emit: receives one message per layer.

    Raises:
        VerificationError: a layer does not have its digest.
        BuildError: a layer is malformed or hostile; names the layer and the entry.
        HostError: no space in ``work``.

    """
    tree = Tree()
    for number, layer in enumerate(image.layers, 1):
        emit(Message(level="info", text=f"layer {number} of {len(image.layers)}"))
        region = resources.enter_context(layer.open())
        if layer.digest is not None:
            verify_region(region, layer.digest, what=layer.name)
        plain, found = resources.enter_context(unpacked(region, work, what=layer.name))
        if found is None:
            verify_region(plain, layer.diff_id, what=layer.name)
        elif found != layer.diff_id:
            raise VerificationError(
                f"{layer.name} unpacks to {found} instead of {layer.diff_id}",
                hint="the image is damaged or was tampered with: get it anew",
                code="digest-mismatch",
            )
        apply_layer(tree, plain, what=layer.name)
    return tree
