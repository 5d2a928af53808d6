"""Checkpoints of nodes that share no folder: which node wrote which files, and how missing files are reported.

Every node has the manifest, which is the same on all of them, and the files of its own ranks. So the folders of all nodes, copied
into one, are an ordinary checkpoint. `about["nodes"]` of the manifest lists [host, ranks] of each node. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.checkpoint.format.folders import rank_file
from parallelize.checkpoint.format.manifest import Manifest

KEY = "nodes"
"""The key in `about` of a manifest."""
_MAX_NODES = 8


@dataclass(frozen=True)
class SavingNode:
    """A node that has saved a part of a checkpoint. `number`: counted from 0."""

    number: int
    host: str
    ranks: tuple[int, ...]

    @property
    def files(self) -> set[str]:
        """The names of the files that its ranks may have written."""
        return set(map(rank_file, self.ranks))

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {short_list([str(rank) for rank in self.ranks], 8)}"
        return f"node {self.number}, host {self.host}, {ranks}"


def saving_nodes(about: dict[str, Any]) -> list[SavingNode]:
    """The nodes that a manifest lists; none if the ranks shared a folder. What is not a list of nodes is ignored."""
    listed, nodes = about.get(KEY), []
    for number, row in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(row, list) and len(row) == 2 and isinstance(row[1], list):
            ranks = tuple(rank for rank in row[1] if type(rank) is int and rank >= 0)
            nodes.append(SavingNode(number, str(row[0])[:80], ranks))
    return nodes


def check_files(manifest: Manifest, present: Collection[str], where: str, fix: str) -> None:
    """Check that no file of a checkpoint is missing.

    Args:
        present: names of the files that there are.
        where: folder, or folders, that were searched.
        fix: what the user can do.

    Raises: CheckpointError `missing-node-files`: one problem for each node, with its host, files and tensors.
    """
    problems = list(missing_files(manifest, present, where, fix))
    if problems:
        raise CheckpointError(*problems[:_MAX_NODES])


def missing_files(manifest: Manifest, present: Collection[str], where: str, fix: str) -> Iterator[Problem]:
    """One problem for each node of which files are missing, and one for missing files of no node."""
    missing = [name for name in manifest.files if name not in present]
    for node in saving_nodes(manifest.about):
        files = [name for name in missing if name in node.files]
        missing = [name for name in missing if name not in node.files]
        if files:
            yield _missing(manifest, files, str(node), where, fix)
    if missing:
        yield _missing(manifest, missing, "", where, fix)


def _missing(manifest: Manifest, files: list[str], node: str, where: str, fix: str) -> Problem:
    absent = set(files)
    tensors = [name for name, saved in manifest.tensors.items() if any(part.file in absent for part in saved.slices)]
    rows = [("node", node)] if node else []
    rows += [("files", short_list(files, 6)), ("tensors", f"{len(tensors)}: {short_list(tensors, 4)}")]
    what = f"{len(files)} of the {len(manifest.files)} files of step {manifest.step} are missing"
    return Problem("missing-node-files", what, where, tuple(rows), fix)
