"""Nodes: the ranks that see the same folder. They are found by files that every rank writes, and all ranks look for.

Where all ranks share a file system, there is one node. Otherwise each node has a folder of its own, at the same path or not, and
the first of its ranks, the leader, does there what only one rank may do.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.run.rank_sync import RankSync, as_parallelize_error


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as one rank sees them.

    Attributes:
        ranks: the ranks of each node, as indices in the mesh; in order of their first ranks.
        hosts: the host name of each node.
        rank: this rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]
    rank: int

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return any(ranks[0] == self.rank for ranks in self.ranks)

    @property
    def several(self) -> bool:
        """Whether there is more than one node."""
        return len(self.ranks) > 1

    def metadata(self) -> list[list[Any]]:
        """[host, ranks] of each node, for the manifest."""
        return [[host, list(ranks)] for host, ranks in zip(self.hosts, self.ranks, strict=True)]

    def on_leaders(self, sync: RankSync, work: Callable[[], Any]) -> list[Any]:
        """Run something on the leaders alone. A collective.

        Returns: what it returned on each rank, as a value of JSON; None of the others.
        Raises: its error, on every rank.
        """
        result, error = None, None
        if self.is_leader:
            try:
                result = work()
            except Exception as caught:
                error = as_parallelize_error(caught)
        return sync.agree(error, result)


def one_node(sync: RankSync) -> Nodes:
    """All ranks as one node."""
    return Nodes((tuple(range(sync.size)),), ("",), sync.rank)


def find_nodes(root: Path, sync: RankSync) -> Nodes:
    """The nodes of these ranks. A collective; creates the folder on every node.

    Raises: CheckpointError `write-failed`, `folders-differ`.
    """
    probe, error = f".shared-{uuid.uuid4().hex}", None
    try:
        with disk.reporting_errors(root):
            folders.make_root(root)
            disk.write_file(root / probe, b"")
    except CheckpointError as caught:
        error = caught
    try:
        probes = sync.agree(error, probe)
        seen = [rank for rank, name in enumerate(probes) if (root / name).is_file()]
        views = sync.all_gather([seen, socket.gethostname()])  # no rank removes its probe before all have looked
    finally:
        with contextlib.suppress(OSError):
            disk.remove_file(root / probe)
    ranks = grouped([seen for seen, _ in views], root)
    return Nodes(ranks, tuple(views[group[0]][1] for group in ranks), sync.rank)


def grouped(views: Sequence[Sequence[int]], root: Path) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, from the ranks whose files each rank sees.

    Raises: CheckpointError `folders-differ` if ranks do not see each other's files mutually.
    """
    odd = [rank for rank, seen in enumerate(views) if rank not in seen or any(views[other] != seen for other in seen)]
    if odd:
        what = f"ranks {odd[:12]} see the files of some ranks that do not see theirs"
        fix = "use file systems that show a new file to all their ranks at once, and one run at a time in a folder"
        raise CheckpointError(Problem("folders-differ", what, str(root), fix=fix))
    return tuple(tuple(seen) for rank, seen in enumerate(views) if seen[0] == rank)


def own_error(work: Callable[[], Any]) -> ParallelizeError | None:
    """Run something. Returns its error, to be agreed on with the other ranks."""
    try:
        work()
    except Exception as caught:
        return as_parallelize_error(caught)
    return None
