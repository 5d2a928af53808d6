"""Saving: every rank writes its own file, and the first rank publishes the checkpoint. No tensor is sent between ranks.

    folder to write into -> each rank's file, flushed -> reports to the first rank -> manifest -> rename -> `latest`

Before the rename there is no new checkpoint; after it there is a complete one. An error on any rank is raised on all
ranks. Nodes that share no folder get the manifest from the first rank, and publish it together: see `node_files`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallelize.base.agreement import problem_from_json, problems_to_json, ranks_by_value
from parallelize.base.boxes import Box
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.format.header import FileInfo
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor, check_tensors
from parallelize.checkpoint.format.saved_slices import arranged
from parallelize.checkpoint.format.writer import write_tensors
from parallelize.checkpoint.run import optimizer_state as optimizers
from parallelize.checkpoint.run.node_files import Nodes, one_node, publish_on_nodes
from parallelize.checkpoint.run.rank_sync import (
    RankSync,
    as_parallelize_error,
)
from parallelize.checkpoint.run.run_contents import Run
from parallelize.checkpoint.run.snapshot import Snapshot
from parallelize.state.transaction import gc_paused


def write_snapshot(
    root: Path,
    snapshot: Snapshot,
    sync: RankSync,
    about: dict[str, Any],
    progress: Callable[[int], None] | None = None,
    nodes: Nodes | None = None,
) -> Path:
    """Write and publish the snapshots that `take` made on every rank. A collective of `sync`.

    Args:
        root: the folder of the run, on this node.
        about: mesh, plan and versions; those of the first rank are saved.
        progress: called with the number of bytes after each write.
        nodes: the ranks that share a folder. None: all ranks do.

    Returns: the published folder.
    Raises: CheckpointError, the same slug on every rank. Nothing is published then, unless the error says so; earlier
        checkpoints are unchanged.
    """
    nodes = nodes or one_node(sync)
    writing = _begin(root, snapshot.step, sync, nodes)
    file, error = None, None
    try:
        if snapshot.outgoing:
            name = folders.rank_file(sync.rank)
            metadata = {"format": "pt", "step": str(snapshot.step)}
            file = write_tensors(writing / name, snapshot.outgoing, metadata, progress)
    except Exception as caught:
        error = as_parallelize_error(caught)
    reports = sync.gather(_report(file, snapshot, error))
    outcome = None
    if reports is not None:
        publish = _manifest_text if nodes.several else partial(_publish, root, writing)
        outcome = publish(snapshot.step, Reports(sync.ranks, reports), about)
    outcome = sync.broadcast(outcome)
    if isinstance(outcome, list) and nodes.is_leader:
        folders.abandon(writing)
    if error is not None:
        raise error
    if isinstance(outcome, list):
        raise CheckpointError(*(problem_from_json(problem, rank) for rank, problem in outcome[:8]))
    if nodes.several:
        publish_on_nodes(root, writing, snapshot.step, outcome.encode(), sync, nodes)
    return root / folders.folder_name(snapshot.step)


def _begin(root: Path, step: int, sync: RankSync, nodes: Nodes) -> Path:
    """The folder to write to, which the leaders create. Raises: CheckpointError of `folders.begin`, on every rank."""
    outcome: Any = None
    error: ParallelizeError | None = None
    if sync.is_coordinator:
        try:
            outcome = folders.begin(root, step).name
        except Exception as caught:
            error = as_parallelize_error(caught)
            outcome = problems_to_json(error.problems)
    outcome = sync.broadcast(outcome)
    if isinstance(outcome, list):
        raise error or CheckpointError(*(problem_from_json(problem, sync.ranks[0]) for problem in outcome))
    if nodes.several:

        def begin_on_node() -> None:
            if not sync.is_coordinator:
                folders.begin(root, step, outcome)

        try:
            nodes.on_leaders(sync, begin_on_node)
        except CheckpointError:
            if nodes.is_leader:
                folders.abandon(root / outcome)
            raise
    return root / outcome


Report = dict[str, Any]
"""What a rank sends to the first one: its problems, or step, file, table of tensors and state."""


def _report(file: FileInfo | None, snapshot: Snapshot, error: ParallelizeError | None) -> Report:
    if error is not None:
        return {"problems": problems_to_json(error.problems)}
    written = [file.name, file.num_bytes, file.header] if file is not None else None
    return {"step": snapshot.step, "file": written, "tensors": snapshot.table, "state": snapshot.state}


Failed = list[tuple[int | None, Any]]
"""(rank, problem) of everything that went wrong; without a rank for disagreements."""


class Reports:
    """What the ranks tell of their parts of a save. Each report is decoded once, or again where an error needs it."""

    def __init__(self, ranks: Sequence[int], reports: Sequence[Report]):
        self.ranks, self._reports = ranks, reports

    def __iter__(self) -> Iterator[tuple[int, Report]]:
        return zip(self.ranks, self._reports, strict=False)


def _publish(root: Path, writing: Path, step: int, reports: Reports, about: dict[str, Any]) -> str | Failed:
    """Publish the checkpoint in the folder of all ranks. Returns the folder's name, or the problems."""
    text = _manifest_text(step, reports, about)
    if isinstance(text, list):
        return text
    try:
        return folders.publish(root, writing, step, text.encode()).name
    except Exception as error:
        return [(reports.ranks[0], problem) for problem in problems_to_json(as_parallelize_error(error).problems)]


def _manifest_text(step: int, reports: Reports, about: dict[str, Any]) -> str | Failed:
    """The manifest of what all ranks have written, or the problems."""
    try:
        with gc_paused():
            merged = _merged(reports)
            return merged.problems or merged.manifest(step, about).to_bytes().decode()
    except Exception as error:
        return [(None, problem) for problem in problems_to_json(as_parallelize_error(error).problems)]


def _merged(reports: Reports) -> _Merge:
    """Raises: CheckpointError `steps-differ`, `ranks-differ`."""
    merged, steps, differs = _Merge(), [], None
    for rank, report in reports:
        if "problems" in report:
            merged.problems += [(rank, problem) for problem in report["problems"]]
            continue
        steps.append((rank, f"save({report['step']})"))
        differs = differs or merged.add(report)
    if merged.problems:
        return merged
    if len({call for _, call in steps}) > 1:
        what = "the ranks save different steps as one checkpoint"
        fix = "call save with the same step on every rank"
        raise CheckpointError(Problem("steps-differ", what, rows=ranks_by_value(steps), fix=fix))
    if differs:
        raise _ranks_differ(differs, reports)
    return merged


class _Merge:
    """What ranks have written, put together report by report."""

    def __init__(self) -> None:
        self.problems: Failed = []
        self.files: dict[str, FileInfo] = {}
        self.states: list[dict[str, Any]] = []
        self._described: dict[str, tuple[str, list[int], dict[str, Any]]] = {}
        self._rows: dict[str, list[tuple[str, str, Box]]] = {}

    def add(self, report: Report) -> str | None:
        """Returns: the name of a tensor that has another dtype or shape on an earlier rank."""
        self.states.append(report["state"])
        if report["file"] is not None:
            info = FileInfo(*report["file"])
            self.files[info.name] = info
        differs = None
        for name, (dtype, shape, boxes, metadata) in report["tensors"].items():
            if self._described.get(name, (dtype, shape))[:2] != (dtype, shape):
                differs = name
            self._described[name] = (dtype, shape, metadata)
            rows = self._rows.setdefault(name, [])
            # the name once, although each report has it
            rows += [(info.name, name if key == name else key, tuple((a, b) for a, b in box)) for key, box in boxes]
        return differs

    def manifest(self, step: int, about: dict[str, Any]) -> Manifest:
        """Raises: CheckpointError `not-covered`."""
        tensors = {
            name: SavedTensor(name, dtype, tuple(shape), arranged(tuple(shape), self._rows.pop(name)), metadata)
            for name, (dtype, shape, metadata) in self._described.items()
        }
        check_tensors(tensors.values(), "what the ranks have written")
        return Manifest(step, about, self.files, tensors, _merge_states(self.states))


def _ranks_differ(name: str, reports: Reports) -> CheckpointError:
    written = [(rank, report["tensors"][name]) for rank, report in reports if name in report["tensors"]]
    rows = ranks_by_value([(rank, f"{dtype} {shape}") for rank, (dtype, shape, _, _) in written])
    what = f"{name} does not have the same dtype and shape on every rank"
    fix = "build the model and its optimizer with the same dtypes and shapes on every rank"
    return CheckpointError(Problem("ranks-differ", what, rows=rows, fix=fix))


def _merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All state except tensors, from what each rank has of it."""
    merged = {key: value for state in states for key, value in state.items() if key not in _BY_RANK}
    names = states[0]["optimizers"]
    merged["optimizers"] = {
        name: optimizers.merge_descriptions([state["optimizers"][name] for state in states]) for name in names
    }
    merged["generators"] = {key: value for state in states for key, value in state.get("generators", {}).items()}
    merged["data"] = {key: value for state in states for key, value in state.get("data", {}).items()} or None
    streams = [state["streams"] for state in states if state["streams"]]
    merged["streams"] = None
    if streams:
        by_position = {key: value for stream in streams for key, value in stream["states"].items()}
        merged["streams"] = {**streams[0], "states": by_position}
    return merged


_BY_RANK = ("optimizers", "generators", "streams", "data")
"""Keys of the state that are different on each rank."""


# -- save time -------------------------------------------------------------------------------------------------------
# How long a save takes, before the first one was measured: bytes of this rank, and how fast its folder takes them.


PROBE_BYTES = 4 * 2**20
_HASH_BYTES_PER_S = 1e9
"""Of one core: hashing and copying, together."""
_STATES = 2  # of Adam, by parameter


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the local shards of tensors, each storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[id(local)] = local.numel() * local.element_size()
    return sum(storages.values())


def write_speed(folder: Path) -> float:
    """Bytes per second of a file that is written and flushed to a folder, which is made if it is missing. Raises:
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".speed-{os.getpid()}"
    began = time.perf_counter()
    try:
        with disk.reporting_errors(path):
            disk.write_file(path, bytes(PROBE_BYTES))
    finally:
        path.unlink(missing_ok=True)
    return PROBE_BYTES / (time.perf_counter() - began)


def state_bytes(run: Run) -> int:
    """Bytes of the model and its optimizers on this rank, where states that are not made yet count as those of Adam."""
    total = local_bytes(run.module.parameters())
    for optimizer in run.optimizers.values():
        stored = local_bytes(
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        )
        stepped = local_bytes(parameter for group in optimizer.param_groups for parameter in group["params"])
        total += stored or _STATES * stepped
    return total


def expected_save_s(folder: Path, run: Run) -> float:
    """Seconds of a save on this rank. Raises: CheckpointError `write-failed`. Cost: a small file."""
    num_bytes, speed = state_bytes(run), write_speed(folder)
    return num_bytes / speed + num_bytes / _HASH_BYTES_PER_S
