"""Publishing a checkpoint on several nodes, none of which sees another's folder: on all of them, or on none.

    1  every leader writes the manifest, and flushes folder and root: the checkpoint is complete on every node
    2  every leader renames its folder
    3  every leader flushes its root, and writes `latest`

No leader begins a phase before all have ended the one before. If one fails, the renames are taken back first, and only then are the
folders removed. So as long as any node has published the step, all nodes have it complete, under one name or the other, and
`complete_interrupted` publishes it where a crash came between the renames. If no node has published it, there is no checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.format.manifest import read_digest
from parallelize.checkpoint.run.nodes import Nodes, own_error
from parallelize.checkpoint.run.rank_sync import RankSync


def publish_on_nodes(root: Path, writing: Path, step: int, manifest: bytes, sync: RankSync, nodes: Nodes) -> None:
    """Publish what the ranks of all nodes have written. A collective.

    Args:
        root: the folder of the run, on this node.
        writing: the folder in it that contains the files.
        manifest: the manifest of the files of all nodes.

    Raises: CheckpointError `write-failed`, `already-saved`, `rank-lost`, on every rank. Nothing is published then, unless the error
        says so, or a rank was lost: the next run then completes the checkpoint, or removes it.
    """
    try:
        nodes.on_leaders(sync, lambda: _prepare(root, writing, manifest))
    except CheckpointError:
        if nodes.is_leader and not sync.lost:  # otherwise others may have gone on
            folders.abandon(writing)
        raise
    error = own_error(lambda: folders.commit(root, writing, step)) if nodes.is_leader else None
    try:
        sync.agree(error)
    except CheckpointError:
        if not sync.lost:
            _take_back(root, writing, step, sync, nodes, renamed=error is None)
        raise
    nodes.on_leaders(sync, lambda: folders.announce(root, step))


def _prepare(root: Path, writing: Path, manifest: bytes) -> None:
    folders.prepare(writing, manifest)
    with disk.reporting_errors(root):
        disk.flush_folder(root)  # the folder's own name must be on the disk before another node renames its folder


def _take_back(root: Path, writing: Path, step: int, sync: RankSync, nodes: Nodes, renamed: bool) -> None:
    """Remove what this save has written, on every node. `renamed`: whether this rank has seen no error of a rename."""

    def retract() -> None:
        if renamed:
            folders.retract(root, writing, step)

    nodes.on_leaders(sync, retract)  # if this fails, the folders stay: a node may have published the step
    if nodes.is_leader:
        folders.abandon(writing)


def complete_interrupted(root: Path, sync: RankSync, nodes: Nodes) -> None:
    """Publish on this node what a crash has left complete here and published on another node. A collective.

    Raises: CheckpointError `write-failed`, on every rank.
    """
    complete: dict[Path, int] = folders.prepared(root) if nodes.is_leader else {}
    steps = {step for on_rank in sync.all_gather(sorted(set(complete.values()))) for step in on_rank}
    if not steps:
        return
    published = nodes.on_leaders(sync, lambda: _digests(root, steps))
    agreed = {tuple(row) for on_rank in published for row in on_rank or ()}

    def publish() -> None:
        for writing, step in complete.items():
            if (step, read_digest(writing)) in agreed and step not in folders.published(root):
                folders.commit(root, writing, step)
                folders.announce(root, step)

    nodes.on_leaders(sync, publish)


def _digests(root: Path, steps: set[int]) -> list[list[Any]]:
    """[step, digest of the manifest] of those of the steps that are published here."""
    return [[step, read_digest(path)] for step, path in folders.published(root).items() if step in steps]
