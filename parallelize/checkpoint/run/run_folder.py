"""The folder of a run: who may write to it, which checkpoints it contains, and which of them are removed.

All ranks share it, or each node has one of its own (`node_files`). On every node the first rank, its leader, locks and
cleans it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelize.base.agreement import problem_from_json, problems_to_json
from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.run.node_files import Nodes, choose_step, complete_interrupted, find_nodes, one_node
from parallelize.checkpoint.run.rank_sync import RankSync


class RunFolder:
    """The folder of a run, locked until `release`. All methods but `release` are collectives.

    Args:
        root: the folder, on this rank's node.
        sync: the ranks.
        shared: all ranks see the folder, which is checked. False: each node has its own, and nodes are found.

    Attributes:
        nodes: the ranks that share a folder.

    Raises: CheckpointError `not-shared`, `folder-in-use`, `folders-differ`, `write-failed`, on every rank.
    """

    def __init__(self, root: Path, sync: RankSync, shared: bool):
        self.root, self.sync, self.shared = root, sync, shared
        self.nodes: Nodes = one_node(sync)
        self._lock: folders.Lock | None = None
        try:
            if shared:
                self._take_shared()
            else:
                self._take_of_node()
        except BaseException:
            self.release()
            raise

    def on_leaders(self, work: Callable[[], Any]) -> None:
        """Run something on the leader of every node. Raises: its error, on every rank."""
        self.nodes.on_leaders(self.sync, work)

    # -- taking it ------------------------------------------------------------------------------------------------

    def _take_shared(self) -> None:
        """The first rank locks the folder and removes unfinished saves; every rank checks that it sees the same
        folder."""
        probe = self.root / f".shared-{self.sync.broadcast(uuid.uuid4().hex)}"

        def take() -> None:
            self._take_lock()
            self._clean()
            with disk.reporting_errors(self.root):
                disk.write_file(probe, probe.name.encode())

        try:
            self.on_leaders(take)
            seen = self.sync.all_gather(probe.is_file())
            blind = [rank for rank, sees in zip(self.sync.ranks, seen, strict=False) if not sees]
            if blind:
                what = f"ranks {blind[:12]} do not see the files that rank {self.sync.ranks[0]} writes"
                fix = (
                    "save to a file system that all machines share; or pass shared=False, and each node keeps its own "
                    "files"
                )
                raise CheckpointError(Problem("not-shared", what, str(self.root), fix=fix))
        except BaseException:
            if self._lock is not None:
                with contextlib.suppress(OSError):
                    disk.remove_file(probe)
            raise
        self.on_leaders(lambda: self._remove(probe))

    def _take_of_node(self) -> None:
        """Find the nodes; the leaders lock their folders, complete or remove what a crash has left, and no rank does
        before."""
        self.nodes = find_nodes(self.root, self.sync)
        self.on_leaders(self._take_lock)
        if self.nodes.several:
            complete_interrupted(self.root, self.sync, self.nodes)
        self.on_leaders(self._clean)

    def _take_lock(self) -> None:
        self._lock = folders.Lock(self.root)

    def _clean(self) -> None:
        with disk.reporting_errors(self.root):
            for path in folders.unfinished(self.root):
                disk.remove_folder(path)

    def _remove(self, probe: Path) -> None:
        with disk.reporting_errors(self.root):
            disk.remove_file(probe)

    def release(self) -> None:
        """Unlock the folder. Not a collective."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- its checkpoints ------------------------------------------------------------------------------------------

    def check_newest(self, step: int) -> None:
        """Raises: CheckpointError `newer-checkpoints`, `already-saved` if a save of `step` would not be the newest."""
        self.on_leaders(lambda: folders.check_newest(self.root, step))

    def remove_surplus(self, keep_last: int | None, keep_every: int | None) -> None:
        """Remove the checkpoints that retention does not keep, on every node. Raises: CheckpointError
        `write-failed`."""

        def remove() -> None:
            steps = folders.published(self.root)
            for step in folders.surplus(list(steps), keep_last, keep_every):
                saved = f"step {max(steps)} is published and complete, but step {step} cannot be removed"
                with disk.reporting_errors(steps[step], what=saved):
                    folders.remove(steps[step])

        self.on_leaders(remove)

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints after `step`, on every node. Raises: CheckpointError `write-failed`."""
        self.on_leaders(lambda: folders.set_aside(self.root, step))

    def choose(self, step: int | None, set_aside: bool) -> Path | None:
        """The folder to load, which may not exist on every node; None where there is no checkpoint.

        Args:
            step: which checkpoint. None: the newest.
            set_aside: newer checkpoints than `step` will be set aside.

        Raises: CheckpointError `no-checkpoint`, `not-a-checkpoint`, `newer-checkpoints`, on every rank.
        """
        if not self.shared:
            return self._choose_on_nodes(step, set_aside)
        name = self.sync.broadcast(self._choose_here(step, set_aside) if self.sync.is_coordinator else None)
        if isinstance(name, list):
            raise CheckpointError(*(problem_from_json(problem, self.sync.ranks[0]) for problem in name))
        return self.root / name if name is not None else None

    def _choose_here(self, step: int | None, set_aside: bool) -> str | list[Any] | None:
        """The name of the folder to load, None where there is none, or problems."""
        steps = folders.published(self.root)
        if step is None and not steps:
            return None
        try:
            chosen = folders.resolve(self.root, step)
            self._check_newer(list(steps), step, set_aside)
            return chosen.name
        except CheckpointError as error:
            return problems_to_json(error.problems)

    def _choose_on_nodes(self, step: int | None, set_aside: bool) -> Path | None:
        if step is None and not any(self.sync.all_gather(bool(folders.published(self.root)))):
            return None
        chosen, steps = choose_step(self.root, step, self.sync)
        self._check_newer(steps, step, set_aside)
        return chosen

    def _check_newer(self, steps: list[int], step: int | None, set_aside: bool) -> None:
        newer = [str(other) for other in steps if step is not None and other > step]
        if newer and not set_aside:
            what = f"there are newer checkpoints than {step}, whose steps cannot be saved again: {short_list(newer, 6)}"
            fix = "resume(step, set_aside=True) renames them; or use another folder"
            raise CheckpointError(Problem("newer-checkpoints", what, str(self.root), fix=fix))
