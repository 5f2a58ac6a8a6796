"""Why a build would run: what changed against another artifact, and which steps that touches."""

from collections.abc import Sequence

from smolbuild import __version__
from smolbuild.build.base_info import base_info, kernel_version
from smolbuild.build.context import BuildContext
from smolbuild.build.line_notes import line_words, lines_now, read_notes
from smolbuild.build.planned import PlannedStep
from smolbuild.core.digest import Digest
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.model.explain import Side, explain
from smolbuild.model.key import KeyInputs
from smolbuild.model.keytree import Change, KeyTree, tree_from_json
from smolbuild.model.lock import Lock

__all__ = ["affected_steps", "changes_json", "changes_since", "side_of", "steps_to_run"]


def side_of(config: ArtifactConfig) -> Side:
    """Return what is known of an artifact's inputs.

    Raises:
        VerificationError: its key tree is malformed.

    """
    return Side(
        tree=tree_from_json(config.key_tree),
        base=config.base,
        kernel=config.kernel_version,
        builder=config.builder_version,
    )


def changes_since(
    context: BuildContext,
    config: ArtifactConfig,
    *,
    inputs: KeyInputs,
    tree: KeyTree,
    lock: Lock,
) -> tuple[Change, ...]:
    """Return what differs from the artifact with ``config`` to the inputs of now.

    Lines of files are named when the artifact was built on this host and is remembered.

    Raises:
        VerificationError: the artifact's key tree is malformed.

    """
    notes = read_notes(context.home.cache, config.key)

    def lines(path: str, old: Digest, new: Digest) -> str:
        del new  # what the file of now has
        return line_words(notes.get(old), lines_now(inputs.files, path)) if old in notes else ""

    now = Side(
        tree=tree,
        base=base_info(inputs.smolfile, lock, inputs.base),
        kernel=kernel_version(lock),
        builder=__version__,
    )
    return explain(side_of(config), now, lines=lines)


def affected_steps(change: Change, again: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the steps that run again because of ``change``.

    ``again`` has a place for each step: its name, or nothing when it is cached.
    """
    if change.first is None:
        return ()
    return tuple(name for name in again[max(change.first, 1) - 1 :] if name)


def steps_to_run(steps: Sequence[PlannedStep]) -> tuple[str, ...]:
    """Return the argument ``again`` of ``affected_steps`` for a plan's steps."""
    return tuple("" if step.cached else step.name for step in steps)


def changes_json(
    changes: Sequence[Change] | None, again: Sequence[str]
) -> list[dict[str, object]] | None:
    """Return the JSON of changes, in any command; None when there is no other build."""
    if changes is None:
        return None
    return [
        {
            "leaf": change.leaf,
            "field": change.field,
            "old": change.old,
            "new": change.new,
            "text": change.text,
            "details": list(change.details),
            "steps": list(affected_steps(change, again)),
        }
        for change in changes
    ]
