"""A checkpoint whose files are on several nodes: which ranks see which files, and what each receives from others.

No folder needs to be complete, or to exist: a rank uses what it sees, and every file must be seen by some rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from parallelize.base.errors import CheckpointError, ParallelizeError, Problem, short_list
from parallelize.base.files.boxes import full_box, shape_of, slices_of
from parallelize.base.files.paths import read_small
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.host_memory import empty, torch_dtype
from parallelize.checkpoint.format.json_decoder import stored_keys
from parallelize.checkpoint.format.manifest import NAME, Manifest, manifest_from, read_manifest
from parallelize.checkpoint.format.saving_nodes import check_files
from parallelize.checkpoint.run.fill_tensors import Files, ReadJob, prepare_jobs
from parallelize.checkpoint.run.rank_sync import RankSync, as_parallelize_error, ranks_by_value
from parallelize.checkpoint.run.run_contents import Run
from parallelize.checkpoint.run.transfer import Transfer

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

    Raises: CheckpointError `not-a-checkpoint`, `other-checkpoint`, `missing-node-files` and those of `read_manifest`, on every rank.
    """

    def __init__(self, folder: Path, sync: RankSync):
        self.sync = sync
        self.manifest = shared_manifest(folder, sync)
        names = list(self.manifest.files)
        present = [(folder / name).is_file() for name in names]
        bits = [int(text, 16) for text in sync.all_gather(_packed(present))]
        seen_by = {
            name: [rank for rank, seen in enumerate(bits) if seen >> number & 1] for number, name in enumerate(names)
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
        """Reads of the tensors of which a part is on another node."""
        files, jobs = self.files, list[ReadJob]()
        for name in sorted(set(needed_state(self.manifest, run, self.sync.rank))):
            saved = self.manifest.tensors.get(name)
            if saved is None or not any(part.file in files.absent for part in saved.slices):
                continue
            if saved.num_bytes > sum(self.manifest.files[part.file].num_bytes for part in saved.slices):
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
