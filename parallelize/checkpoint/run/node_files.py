"""A checkpoint whose files are on several nodes: which ranks see which files, and what each receives from others.

No folder needs to be complete, or to exist: a rank uses what it sees, and every file must be seen by some rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallelize.base.agreement import ranks_by_value
from parallelize.base.boxes import full_box, shape_of, slices_of
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem, short_list
from parallelize.base.files.paths import read_small
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.format.device_pieces import empty, torch_dtype
from parallelize.checkpoint.format.folders import check_files
from parallelize.checkpoint.format.json_codec import stored_keys
from parallelize.checkpoint.format.manifest import NAME, Manifest, manifest_from, read_digest, read_manifest
from parallelize.checkpoint.format.saved_slices import files_of
from parallelize.checkpoint.run.fill_tensors import Files, ReadJob, prepare_jobs
from parallelize.checkpoint.run.rank_sync import RankSync, as_parallelize_error
from parallelize.checkpoint.run.run_contents import Run
from parallelize.checkpoint.run.snapshot import Transfer

T = torch.Tensor
_FIX = (
    "run a rank on that node, or copy these files into the same folder of any node; a save that was interrupted is "
    "completed by the next Checkpointer with shared=False; or load another step"
)
_MOST_STEPS = 8


class NodeFiles:
    """A checkpoint on several nodes. All ranks open one together.

    Attributes:
        manifest: of the checkpoint, also on nodes without one.
        files: what this rank sees of it.
        server_of: file -> index of the rank that reads it for ranks that do not see it.

    Raises: CheckpointError `not-a-checkpoint`, `other-checkpoint`, `missing-node-files` and those of `read_manifest`,
        on every rank.
    """

    def __init__(self, folder: Path, sync: RankSync):
        self.sync = sync
        self.manifest = shared_manifest(folder, sync)
        names = list(self.manifest.files)
        present = [(folder / name).is_file() for name in names]
        bits = [int(text, 16) for text in sync.all_gather(_packed(present))]
        seen_by = {
            name: [rank for rank, visible in enumerate(bits) if visible >> number & 1]
            for number, name in enumerate(names)
        }
        check_files(self.manifest, {name for name, ranks in seen_by.items() if ranks}, str(folder), _FIX)
        # the files of a node are divided among its ranks
        self.server_of = {name: ranks[number % len(ranks)] for number, (name, ranks) in enumerate(seen_by.items())}
        absent = [name for name, is_here in zip(names, present, strict=True) if not is_here]
        self.files = Files(folder, self.manifest, absent=absent)

    def transfer(self, jobs: Sequence[ReadJob]) -> Transfer:
        """The part of these reads that other ranks do. A collective."""
        return Transfer(self.files, jobs, self.server_of, self.sync)

    def receive_state(self, run: Run, check: bool) -> None:
        """Receive the tensors inside plain values that this rank will decode. A collective.

        Raises: CheckpointError of `Transfer`, on every rank.
        """
        jobs: list[ReadJob] = []
        error: ParallelizeError | None = None
        try:
            jobs = self._state_jobs(run)
            prepare_jobs(self.files, jobs, check)
        except Exception as caught:
            error = as_parallelize_error(caught)
        self.sync.agree(error)
        transfer = self.transfer(jobs)
        transfer.prepare(check)
        transfer.run()

    def _state_jobs(self, run: Run) -> list[ReadJob]:
        """Reads of tensors that are partly on another node."""
        files, jobs = self.files, list[ReadJob]()
        for name in sorted(set(needed_state(self.manifest, run, self.sync.rank))):
            saved = self.manifest.tensors.get(name)
            if saved is None or files.absent.isdisjoint(files_of(saved.slices)):
                continue
            if saved.num_bytes > sum(self.manifest.files[file].num_bytes for file in files_of(saved.slices)):
                what = f"{name} of {list(saved.shape)} is larger than the files that contain it"
                raise CheckpointError(Problem("wrong-entry", what, str(files.folder)))
            full = files.received[name] = empty(saved.shape, torch_dtype(saved.dtype))
            for part in saved.slices:
                view: Any = full[slices_of(part.box)]
                jobs.append(ReadJob(part.file, part.key, 0, full_box(shape_of(part.box)), view, hidden=True))
        return jobs


def shared_manifest(folder: Path, sync: RankSync) -> Manifest:
    """The manifest of a checkpoint, on every rank: from the first rank that has it. A collective.

    Raises: CheckpointError `not-a-checkpoint`, `other-checkpoint` and those of `read_manifest`, on every rank.
    """
    manifest, error = None, None
    try:
        if (folder / NAME).is_file():
            manifest = read_manifest(folder)
    except Exception as caught:
        error = as_parallelize_error(caught)
    digests = sync.agree(error, manifest.digest if manifest is not None else "")
    if len(set(filter(None, digests))) > 1:
        rows = ranks_by_value([(rank, f"manifest {digest[:16]}") for rank, digest in enumerate(digests) if digest])
        fix = "keep the folders of one run on all nodes; move the others away"
        what = "the nodes have different checkpoints of one step"
        raise CheckpointError(Problem("other-checkpoint", what, str(folder), rows, fix))
    if all(digests):
        assert manifest is not None
        return manifest
    source = next((rank for rank, digest in enumerate(digests) if digest), None)
    if source is None:
        raise CheckpointError(Problem("not-a-checkpoint", "has no manifest on any node", str(folder)))
    text = sync.broadcast(read_small(folder, NAME, 4 << 30).decode() if sync.rank == source else None, source)
    return manifest if manifest is not None else manifest_from(text.encode(), f"the manifest of rank {source}")


def needed_state(manifest: Manifest, run: Run, rank: int) -> Iterable[str]:
    """Names of the tensors inside plain values that a rank decodes when it loads this run."""
    state = manifest.state
    parts: list[Any] = [state.get("values")]
    parts += [(state.get("optimizers") or {}).get(name) for name in run.optimizers]
    parts += [(state.get("user") or {}).get(name) for name in run.user]
    parts += [state.get("data")] if run.data is not None else []
    parts += [state.get("streams")] if run.streams is not None else []
    generators = state.get("generators") or {}
    if run.generators and generators:  # those of the first rank seed the others on another mesh
        parts += [generators.get(str(rank)), generators[min(generators)]]
    for part in parts:
        yield from stored_keys(part)


def choose_step(folder: str | os.PathLike, step: int | None, sync: RankSync) -> tuple[Path, list[int]]:
    """The folder of a step, where some nodes may not have it. A collective.

    Args:
        folder: the folder of a run, or of one step.
        step: which step. None: the newest on any node.

    Returns: the folder, which may not exist on this rank, and the newest steps on all nodes.
    Raises: CheckpointError `no-checkpoint`, `not-a-checkpoint`, on every rank.
    """
    root, error = Path(folder), None
    steps: list[int] = []
    is_step = step is None and (root / NAME).is_file()
    try:
        steps = list(folders.published(root))
        if step is None and not is_step and steps:
            folders.resolve(root)  # for the check of `latest`
    except CheckpointError as caught:
        error = caught
    newest = steps[-_MOST_STEPS:] + ([step] if step in steps else [])
    answers = sync.agree(error, [is_step, newest])
    found = sorted({number for _, on_rank in answers for number in on_rank})
    if any(is_step for is_step, _ in answers):
        return root, found
    chosen = step if step is not None else found[-1] if found else None
    if chosen is None or chosen not in found:
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        rows = (("existing steps", short_list([str(number) for number in found]) or "none"),)
        what = f"{root} contains {missing} on any node"
        raise CheckpointError(Problem("no-checkpoint", what, rows=rows, fix="check the folder"))
    return root / folders.folder_name(chosen), found


def _packed(present: Sequence[bool]) -> str:
    """Bits as text, for a short message."""
    return f"{sum(1 << number for number, is_here in enumerate(present) if is_here):x}"


# -- nodes -----------------------------------------------------------------------------------------------------------
# Nodes: the ranks that see the same folder. They are found by files that every rank writes, and all ranks look for.
# Where all ranks share a file system, there is one node. Otherwise each node has a folder of its own, at the same
# path or not, and the first of its ranks, the leader, does there what only one rank may do.


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
        visible = [rank for rank, name in enumerate(probes) if (root / name).is_file()]
        views = sync.all_gather([visible, socket.gethostname()])  # no rank removes its probe before all have looked
    finally:
        with contextlib.suppress(OSError):
            disk.remove_file(root / probe)
    ranks = grouped([visible for visible, _ in views], root)
    return Nodes(ranks, tuple(views[group[0]][1] for group in ranks), sync.rank)


def grouped(views: Sequence[Sequence[int]], root: Path) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, from the ranks whose files each rank sees.

    Raises: CheckpointError `folders-differ` if ranks do not see each other's files mutually.
    """
    odd = [
        rank
        for rank, visible in enumerate(views)
        if rank not in visible or any(views[other] != visible for other in visible)
    ]
    if odd:
        what = f"ranks {odd[:12]} see the files of some ranks that do not see theirs"
        fix = "use file systems that show a new file to all their ranks at once, and one run at a time in a folder"
        raise CheckpointError(Problem("folders-differ", what, str(root), fix=fix))
    return tuple(tuple(visible) for rank, visible in enumerate(views) if visible[0] == rank)


def own_error(work: Callable[[], Any]) -> ParallelizeError | None:
    """Run something. Returns its error, to be agreed on with the other ranks."""
    try:
        work()
    except Exception as caught:
        return as_parallelize_error(caught)
    return None


# -- publish on nodes ------------------------------------------------------------------------------------------------
# Publishing a checkpoint on several nodes, none of which sees another's folder: on all of them, or on none. 1 every
# leader writes the manifest, and flushes folder and root: the checkpoint is complete on every node 2 every leader
# renames its folder 3 every leader flushes its root, and writes `latest` No leader begins a phase before all have
# ended the one before. If one fails, the renames are taken back first, and only then are the folders removed. So as
# long as any node has published the step, all nodes have it complete, under one name or the other, and
# `complete_interrupted` publishes it where a crash came between the renames. If no node has published it, there is no
# checkpoint.


def publish_on_nodes(root: Path, writing: Path, step: int, manifest: bytes, sync: RankSync, nodes: Nodes) -> None:
    """Publish what the ranks of all nodes have written. A collective.

    Args:
        root: the folder of the run, on this node.
        writing: the folder in it that contains the files.
        manifest: the manifest of the files of all nodes.

    Raises: CheckpointError `write-failed`, `already-saved`, `rank-lost`, on every rank. Nothing is published then,
        unless the error says so, or a rank was lost: the next run then completes the checkpoint, or removes it.
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
