"""The numbering of a tree's nodes as inodes of an ext4 image."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from smolbuild.core.errors import BuildError
from smolbuild.source.ext4_layout import FIRST_INODE
from smolbuild.source.ext4_records import directory_length
from smolbuild.source.tree import Kind, Node, Tree

__all__ = ["NumberedTree"]

_ROOT_INODE = 2
_LOST = b"lost+found"
_LOST_BLOCKS = 4
"""As many as mke2fs gives it, so that e2fsck can move files there without allocating."""


@dataclass(slots=True)
class NumberedTree:
    """The nodes of a tree with their inode numbers, in the order in which they are written.

    Names are visited in byte order and parents first, so numbers depend on the tree alone.
    """

    nodes: list[tuple[int, Node]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """Inode number by the node's identity."""
    links: dict[int, int] = field(default_factory=dict)
    """Link count by inode number."""
    parents: dict[int, int] = field(default_factory=dict)
    """Of directories: inode number of the parent."""
    root: Node = field(default_factory=lambda: Node(kind=Kind.DIRECTORY))
    lost: Node = field(default_factory=lambda: Node(kind=Kind.DIRECTORY, mode=0o700))

    @classmethod
    def of(cls, tree: Tree) -> Self:
        """Number the nodes of ``tree``; raises BuildError when /lost+found is no directory."""
        result = cls(root=tree.root)
        result.lost = tree.root.children.get(_LOST, result.lost)
        if result.lost.kind is not Kind.DIRECTORY:
            raise BuildError("/lost+found of the image is not a directory")
        result._add(tree.root, _ROOT_INODE, _ROOT_INODE)
        result._add(result.lost, FIRST_INODE, _ROOT_INODE)
        following = FIRST_INODE + 1
        pending = [tree.root]
        while pending:
            directory = pending.pop()
            number = result.numbers[id(directory)]
            below = []
            for _, child in result.entries(directory):
                if id(child) not in result.numbers:
                    result._add(child, following, number)
                    following += 1
                if child.kind is Kind.DIRECTORY:
                    below.append(child)
                    result.links[number] += 1
                else:
                    result.links[result.numbers[id(child)]] += 1
            pending.extend(reversed(below))
        return result

    def _add(self, node: Node, number: int, parent: int) -> None:
        self.numbers[id(node)] = number
        self.nodes.append((number, node))
        self.links[number] = 2 if node.kind is Kind.DIRECTORY else 0
        self.parents[number] = parent

    def entries(self, directory: Node) -> Iterator[tuple[bytes, Node]]:
        """Yield the names in ``directory`` in byte order, ``lost+found`` of the root included."""
        children = directory.children
        if directory is self.root:
            children = {**children, _LOST: self.lost}
        for name in sorted(children):
            yield name, children[name]

    def directory_blocks(self, directory: Node) -> int:
        """Return how many blocks the directory's entries take."""
        needed = directory_length(name for name, _ in self.entries(directory))
        return max(needed, _LOST_BLOCKS) if directory is self.lost else needed

    def name(self, wanted: Node) -> str:
        """Return a path of ``wanted``, for errors."""
        tree = Tree()
        tree.root = self.root
        return next((os.fsdecode(b"/" + path) for path, node in tree.walk() if node is wanted), "?")
