"""Loading a training checkpoint into whatever mesh there is: match, read and compare, agree, and only then change anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint import run_state
from parallelize.checkpoint.dtypes import loses
from parallelize.checkpoint.fill import Files, Job, clear_padding, fill_jobs, jobs_for, prepare_jobs, read_whole
from parallelize.checkpoint.fresh import Fresh
from parallelize.checkpoint.held import Held, Place, targets
from parallelize.checkpoint.manifest import Manifest, Saved, read_manifest
from parallelize.checkpoint.meeting import Meeting, known
from parallelize.checkpoint.memory import torch_dtype
from parallelize.checkpoint.restore import Restored, plan_optimizer
from parallelize.checkpoint.schedulers import check_scheduler, load_scheduler
from parallelize.checkpoint.snapshot import Run, fold
from parallelize.checkpoint.tree_reader import decode
from parallelize.errors import CheckpointError, ParallelizeError, Problem, near, short_list

T = torch.Tensor


@dataclass
class Loading:
    """One load: what was asked for, and everything that was read before anything was changed."""

    strict: bool
    cast: bool
    check: bool
    manifest: Manifest = field(default_factory=lambda: Manifest(0, {}, {}, {}, {}))
    files: Files | None = None
    weights: list[tuple[Held, T]] = field(default_factory=list)
    optimizers: list[Restored] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    values: Any = None
    jobs: list[Job] = field(default_factory=list)


def load_run(
    folder: Path,
    run: Run,
    place: Place,
    meeting: Meeting,
    *,
    strict: bool = True,
    cast: bool = False,
    check: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Loading:
    """Load a checkpoint into a run. A collective of `meeting`.

    Args:
        folder: of a step. strict: a missing or unexpected tensor is an error. cast: dtypes may lose precision.
        check: compare every hash of what is read.

    Returns: what was read; `values` are those that were given to the save.
    Raises: CheckpointError, on every rank, before anything is changed.
    """
    wanted, error = _wanted(run, place)
    names = _all_names(place, wanted, meeting)
    fresh = Fresh(run.module)
    loading = Loading(strict, cast, check)
    try:
        with ExitStack() as files:
            try:
                if error is not None:
                    raise error
                _read(loading, files, folder, run, place, fresh, wanted, names, progress)
            except Exception as found:
                error = known(found)
            _agree_on_digest(meeting.agree(error, loading.manifest.digest))
            _commit(loading, run, place, meeting)
    except BaseException:
        fresh.undo()
        raise
    return loading


def _wanted(run: Run, place: Place) -> tuple[list[Held], ParallelizeError | None]:
    try:
        fold(run.module)
        return targets(place), None
    except Exception as found:
        return [], known(found)


def _all_names(place: Place, wanted: list[Held], meeting: Meeting) -> set[str]:
    """Tensors of the whole model, those of other pipeline stages too."""
    own = [held.name for held in wanted]
    if place.cut is None:
        return set(own)
    return {name for names in meeting.all(own if place.is_first else []) for name in names}


def _agree_on_digest(digests: list[str]) -> None:
    if len(set(digests)) > 1:
        what = f"ranks read different checkpoints: manifests {short_list(sorted(set(digests)))}"
        raise CheckpointError(Problem("other-checkpoint", what, fix="let all of them read the same folder"))


def _read(
    loading: Loading,
    stack: ExitStack,
    folder: Path,
    run: Run,
    place: Place,
    fresh: Fresh,
    wanted: list[Held],
    names: set[str],
    progress: Callable[[int], None] | None,
) -> None:
    """Match and read, without changing what anybody uses."""
    manifest = loading.manifest = read_manifest(folder)
    _check_names(manifest, wanted, names, loading.strict, fresh.was_meta, str(folder))
    files = loading.files = stack.enter_context(Files(folder, manifest))
    if fresh.was_meta:
        fresh.allocate(place.mesh.device_type if place.mesh is not None else None)
        wanted = targets(place)
    _plan_weights(loading, files, wanted, fresh)
    for called, optimizer in run.optimizers.items():
        share = _share_of(manifest, called, loading.strict)
        if share is not None:
            restored, jobs = plan_optimizer(place, called, optimizer, share, files, loading.strict)
            loading.optimizers.append(restored)
            loading.jobs += jobs
    prepare_jobs(files, loading.jobs, loading.check, progress)
    _read_state(loading, files, run, place)


def _share_of(manifest: Manifest, called: str, strict: bool) -> dict[str, Any] | None:
    saved = manifest.state.get("optimizers", {})
    if called not in saved and strict:
        there = short_list(list(saved)) or "none"
        what = f"no state of an optimiser called {called!r} was saved; there: {there}"
        raise CheckpointError(
            Problem("no-optimizer-state", what, fix="load without an optimiser, or with strict=False")
        )
    return saved.get(called)


def _check_names(
    manifest: Manifest, wanted: list[Held], names: set[str], strict: bool, on_meta: bool, where: str
) -> None:
    """Missing, unexpected and misshapen tensors, all at once."""
    saved = {name: one for name, one in manifest.tensors.items() if name.startswith("model/")}
    problems = []
    missing = [name for name in dict.fromkeys(held.name for held in wanted) if name not in saved]
    unexpected = [name for name in saved if name not in names]
    if strict or on_meta:  # what is not filled there would hold anything
        problems += [_unmatched("missing-tensor", "was not saved", name, saved, where) for name in missing[:_FEW]]
    if strict:
        problems += [
            _unmatched("unexpected-tensor", "is not in this model", name, names, where) for name in unexpected[:_FEW]
        ]
    shapes = [h for h in wanted if h.name in saved and saved[h.name].shape != h.stored.shape]
    for held in shapes[:_FEW]:
        was, is_now = list(saved[held.name].shape), list(held.stored.shape)
        what = f"{_plain(held.name)} was saved as {was}, the model has {is_now}"
        problems.append(Problem("wrong-shape", what, where, fix="load it into the model that was saved"))
    if problems:
        rest = (
            (len(missing) if strict or on_meta else 0)
            + (len(unexpected) if strict else 0)
            + len(shapes)
            - len(problems)
        )
        more = [Problem("more-problems", f"and {rest} more of the kind", where)] if rest else []
        raise CheckpointError(*problems, *more)


_FEW = 10  # problems of a kind that are told: looking for near names takes its time


def _plain(name: str) -> str:
    return name.removeprefix("model/")


def _unmatched(slug: str, what: str, name: str, others: Iterable[str], where: str) -> Problem:
    close = near(_plain(name), [_plain(other) for other in others])
    fix = (
        "did you mean " + " or ".join(f"`{one}`" for one in close) + "?"
        if close
        else "load it into the model that was saved"
    )
    return Problem(slug, f"{_plain(name)} {what}", where, fix=fix + "; strict=False goes on without")


def _plan_weights(loading: Loading, files: Files, wanted: list[Held], fresh: Fresh) -> None:
    _check_dtypes(loading.manifest, wanted, loading.cast)
    for held in wanted:
        saved = loading.manifest.tensors.get(held.name)
        if saved is not None:
            if fresh.was_meta:
                clear_padding(held.stored, held.stored.local)
            else:
                loading.weights.append((held, held.stored.local))
            loading.jobs += jobs_for(files, saved, held.stored, held.stored.local, hidden=fresh.was_meta)


def _check_dtypes(manifest: Manifest, wanted: list[Held], cast: bool) -> None:
    """A weight may be kept in a narrower dtype where a copy beside it holds all of it."""
    kept: dict[str, bool] = {}
    for held in wanted:
        saved = manifest.tensors.get(held.name)
        if saved is not None:
            kept[held.name] = kept.get(held.name, False) or not loses(saved.dtype, held.dtype)
    lost = [name for name, fine in kept.items() if not fine]
    whole_numbers = [name for name in lost if not _floating(manifest.tensors[name], wanted)]
    if whole_numbers or (lost and not cast):
        lost = whole_numbers or lost
        saved, held = manifest.tensors[lost[0]], next(one for one in wanted if one.name == lost[0])
        what = f"{len(lost)} tensors were saved in a wider dtype than the model keeps: {_plain(lost[0])} "
        what += f"{saved.dtype}, here {held.dtype}"
        raise CheckpointError(
            Problem("narrower-dtype", what, fix="cast=True accepts the loss; or widen the model first")
        )


def _floating(saved: Saved, wanted: list[Held]) -> bool:
    """Whether both sides are floating numbers, whose precision alone may be lost."""
    codes = {saved.dtype, *(held.dtype for held in wanted if held.name == saved.name)}
    return all(torch_dtype(code).is_floating_point for code in codes)


def _read_state(loading: Loading, files: Files, run: Run, place: Place) -> None:
    """Everything that is no tensor, decoded: what is wrong with it shows now."""
    state = loading.manifest.state
    if loading.strict:
        _check_absent(run, state, str(files.folder))

    def tensors(key: str) -> T:
        return read_whole(files, key, loading.check)

    loading.values = decode(state.get("values"), tensors, "values")
    for name, scheduler in run.schedulers.items():
        if name in (state.get("schedulers") or {}):
            check_scheduler(scheduler, state["schedulers"][name])
    if run.data is not None and state.get("data") is not None:
        loading.state["data"] = run_state.decoded_data(place, state["data"], tensors)
    saved = state.get("user") or {}
    loading.state["user"] = {name: decode(saved[name], tensors, f"user.{name}") for name in run.user if name in saved}
    if run.streams is not None and state.get("streams"):
        run.streams.check_closed()
        loading.state["streams"] = run_state.decoded_streams(run.streams, state["streams"], tensors)
    if run.generators and state.get("generators"):
        same = loading.manifest.about.get("mesh") == mesh_of(place)
        loading.state["generators"] = run_state.decoded_generators(place, state["generators"], same, tensors)


def _check_absent(run: Run, state: dict[str, Any], where: str) -> None:
    """Raises: CheckpointError `missing-state` for what was asked for, and was not saved."""
    absent = [name for name in run.user if name not in (state.get("user") or {})]
    absent += [name for name in run.schedulers if name not in (state.get("schedulers") or {})]
    absent += ["data"] if run.data is not None and state.get("data") is None else []
    absent += ["streams"] if run.streams is not None and not state.get("streams") else []
    if absent:
        what = f"no state of {short_list(absent)} was saved"
        raise CheckpointError(Problem("missing-state", what, where, fix="leave it out, or load with strict=False"))


def mesh_of(place: Place) -> list[list[Any]]:
    """The mesh as a manifest keeps it."""
    return [[name, size] for name, size in place.spec.axes] if place.spec is not None else []


@torch.no_grad()
def _commit(loading: Loading, run: Run, place: Place, meeting: Meeting) -> None:
    """Change what is in use. Users' own objects come first, since they may refuse."""
    error: ParallelizeError | None = None
    if run.schedulers or run.user or run.data is not None:
        try:
            _hand_over(loading, run)
        except Exception as found:  # a user's object refused
            error = known(found)
        meeting.agree(error)
    try:
        assert loading.files is not None
        for held, local in loading.weights:
            clear_padding(held.stored, local)
        fill_jobs(loading.files, loading.jobs)
        for _, local in loading.weights:
            torch.autograd.graph.increment_version(local)
    except Exception as found:  # the disk failed between two readings
        error = known(found)
    meeting.agree(error)
    for restored in loading.optimizers:
        restored.apply()
    state, saved = loading.manifest.state, loading.state
    run_state.restore_position(place, run.pipeline, state.get("position") or {})
    if "streams" in saved and run.streams is not None:
        run.streams.load_state_dict(saved["streams"])
    if "generators" in saved:
        saved["generators"]()


def _hand_over(loading: Loading, run: Run) -> None:
    schedulers = loading.manifest.state.get("schedulers") or {}
    for name, scheduler in run.schedulers.items():
        if name in schedulers:
            load_scheduler(scheduler, schedulers[name])
    if "data" in loading.state:
        run.data.load_state_dict(loading.state["data"])
    for name, one in loading.state.get("user", {}).items():
        run.user[name].load_state_dict(one)
