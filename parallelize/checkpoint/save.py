"""Saving: every rank writes its own file, the first rank publishes. No tensor moves between ranks.

    writing folder -> each rank's file, flushed -> what each has written, to the first rank -> manifest -> rename -> `latest`

Up to the rename there is no new checkpoint, after it there is a complete one. What fails on any rank fails on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelize.checkpoint import folders, optimizers
from parallelize.checkpoint.header import FileInfo
from parallelize.checkpoint.manifest import Manifest, Piece, Saved, check_tensors
from parallelize.checkpoint.meeting import Meeting, known, restored, told
from parallelize.checkpoint.snapshot import Snapshot
from parallelize.checkpoint.writer import write_tensors
from parallelize.errors import CheckpointError, ParallelizeError, Problem


def write_snapshot(
    root: Path,
    snapshot: Snapshot,
    meeting: Meeting,
    about: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write and publish what `take` took on every rank. A collective of `meeting`.

    Args:
        about: of the first rank counts: mesh, plan, versions.

    Returns: the published folder.
    Raises: CheckpointError, the same slug on every rank. Nothing is published then, unless it says so; what was saved before
        is untouched.
    """
    error: ParallelizeError | None
    writing, error = _begun(root, snapshot.step, meeting)
    if error is not None:
        raise error
    file = None
    try:
        if snapshot.outgoing:
            name = f"rank-{meeting.rank:05d}.safetensors"
            metadata = {"format": "pt", "step": str(snapshot.step)}
            file = write_tensors(writing / name, snapshot.outgoing, metadata, progress)
    except Exception as found:
        error = known(found)
    shares = meeting.gather(_share(file, snapshot, error))
    verdict = meeting.share(_published(root, writing, snapshot.step, shares, about) if shares is not None else None)
    if error is not None:
        raise error
    if isinstance(verdict, list):
        raise CheckpointError(*(restored(problem, rank) for rank, problem in verdict[:8]))
    return root / verdict


def _begun(root: Path, step: int, meeting: Meeting) -> tuple[Path, ParallelizeError | None]:
    """The folder to write into, made by the first rank."""
    said: Any = None
    error: ParallelizeError | None = None
    if meeting.leads:
        try:
            said = folders.begin(root, step).name
        except Exception as found:
            error = known(found)
            said = told(error)
    said = meeting.share(said)
    if isinstance(said, list):
        return root, error or CheckpointError(*(restored(problem, meeting.ranks[0]) for problem in said))
    return root / said, None


def _share(file: FileInfo | None, snapshot: Snapshot, error: ParallelizeError | None) -> dict[str, Any]:
    """What this rank tells the first one."""
    if error is not None:
        return {"problems": told(error)}
    written = [file.name, file.num_bytes, file.header] if file is not None else None
    return {"step": snapshot.step, "file": written, "tensors": snapshot.table, "state": snapshot.state}


def _published(root: Path, writing: Path, step: int, shares: list[Any], about: dict[str, Any]) -> Any:
    """The published folder's name; or (rank, problem) of everything that went wrong."""
    problems = [(rank, problem) for rank, share in enumerate(shares) for problem in share.get("problems", ())]
    if not problems:
        try:
            return folders.publish(root, writing, step, _manifest(step, shares, about).to_bytes()).name
        except Exception as error:
            problems = [(0, problem) for problem in told(known(error))]
    folders.abandon(writing)
    return problems


def _manifest(step: int, shares: list[dict[str, Any]], about: dict[str, Any]) -> Manifest:
    """Raises: CheckpointError `not-covered`, `steps-differ`."""
    steps = sorted({share["step"] for share in shares})
    if steps != [step]:
        raise CheckpointError(Problem("steps-differ", f"ranks save the steps {steps} as one", fix="save(step) alike"))
    files: dict[str, FileInfo] = {}
    tensors: dict[str, Saved] = {}
    for share in shares:
        if share["file"] is not None:
            info = FileInfo(*share["file"])
            files[info.name] = info
        for name, (dtype, shape, pieces, more) in share["tensors"].items():
            here = tuple(Piece(share["file"][0], key, tuple((a, b) for a, b in box)) for key, box in pieces)
            known = tensors.get(name)
            if known is not None and (known.dtype, list(known.shape)) != (dtype, shape):
                what = f"{name} is {known.dtype} {list(known.shape)} on one rank, {dtype} {shape} on another"
                raise CheckpointError(Problem("ranks-differ", what))
            tensors[name] = Saved(name, dtype, tuple(shape), (*(known.pieces if known else ()), *here), more)
    check_tensors(tensors.values(), "what the ranks have written")
    return Manifest(step, about, files, tensors, _merged([share["state"] for share in shares]))


def _merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' shares of what is no tensor."""
    whole = {key: value for state in states for key, value in state.items() if key not in _BY_RANK}
    names = states[0]["optimizers"]
    whole["optimizers"] = {name: optimizers.merged([state["optimizers"][name] for state in states]) for name in names}
    whole["generators"] = {rank: one for state in states for rank, one in state.get("generators", {}).items()}
    whole["data"] = {rank: one for state in states for rank, one in state.get("data", {}).items()} or None
    streams = [state["streams"] for state in states if state["streams"]]
    whole["streams"] = None
    if streams:
        together = {key: one for stream in streams for key, one in stream["states"].items()}
        whole["streams"] = {**streams[0], "states": together}
    return whole


_BY_RANK = ("optimizers", "generators", "streams", "data")
