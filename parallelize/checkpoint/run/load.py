"""Loading a training checkpoint on any mesh. Nothing is changed until all ranks have read and compared everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallelize.base.agreement import ranks_by_value
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem, near, short_list
from parallelize.checkpoint.format.device_pieces import torch_dtype
from parallelize.checkpoint.format.folders import check_files, saving_nodes
from parallelize.checkpoint.format.header import is_lossy
from parallelize.checkpoint.format.json_codec import decode
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor, read_manifest
from parallelize.checkpoint.format.resized_vocabulary import ResizedVocabulary, resized_vocabulary
from parallelize.checkpoint.run import run_state
from parallelize.checkpoint.run.fill_tensors import (
    Files,
    ReadJob,
    fill_jobs,
    jobs_for,
    prepare_jobs,
    read_full,
)
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh, targets
from parallelize.checkpoint.run.meta_model import MetaModel
from parallelize.checkpoint.run.node_files import NodeFiles
from parallelize.checkpoint.run.optimizer_state import RestoredOptimizer, plan_optimizer
from parallelize.checkpoint.run.rank_sync import RankSync, as_parallelize_error
from parallelize.checkpoint.run.run_contents import Run
from parallelize.checkpoint.run.run_state import check_scheduler, load_scheduler
from parallelize.checkpoint.run.snapshot import Transfer
from parallelize.state.full_values import reshard_units
from parallelize.state.stored_slices import clear_padding

T = torch.Tensor


@dataclass(frozen=True)
class LoadOptions:
    """How to load.

    Attributes:
        strict: a missing or unexpected tensor is an error. cast: dtypes may lose precision.
        check: compare every hash of what is read. progress: called with the number of bytes after each read.
        resize_vocabulary: of another number of tokens, read those that both have.
    """

    strict: bool = True
    cast: bool = False
    check: bool = True
    resize_vocabulary: bool = False
    progress: Callable[[int], None] | None = None


@dataclass
class Loading:
    """One load: its options, and everything that was read before anything was changed."""

    options: LoadOptions
    manifest: Manifest = field(default_factory=lambda: Manifest(0, {}, {}, {}, {}))
    weights: list[tuple[LocalTensor, T]] = field(default_factory=list)
    optimizers: list[RestoredOptimizer] = field(default_factory=list)
    resized: ResizedVocabulary | None = None
    state: dict[str, Any] = field(default_factory=dict)
    values: Any = None
    jobs: list[ReadJob] = field(default_factory=list)


def load_run(
    folder: Path, run: Run, on_mesh: ModelOnMesh, sync: RankSync, options: LoadOptions, *, shared: bool = True
) -> Loading:
    """Load a checkpoint into a run. A collective of `sync`.

    Args:
        folder: the folder of a step.
        shared: all ranks see the folder. False: ranks receive from others what they do not see.

    Returns: what was read; `values` are those that were passed to the save.
    Raises: CheckpointError, on every rank, before anything is changed.
    """
    tensors, error = _targets(run, on_mesh)
    names = _all_names(on_mesh, tensors, sync)
    meta_model = MetaModel(run.module)
    loading = Loading(options)
    files, transfer = None, None
    try:
        nodes = None if shared else _open_on_nodes(folder, run, sync, options, error)
        files = nodes.files if nodes is not None else None
        try:
            if error is not None:
                raise error
            files = files or _open(folder)
            loading.manifest = files.manifest
            matching = _Matching(
                files.manifest, str(folder), tensors, names, _resized(files.manifest, on_mesh, tensors)
            )
            loading.resized = matching.resized if options.resize_vocabulary else None
            _check_names(matching, options, meta_model.was_meta)
            _read(loading, files, run, on_mesh, meta_model, tensors)
        except Exception as caught:
            error = as_parallelize_error(caught)
        _check_same_checkpoint(sync.ranks, sync.agree(error, [loading.manifest.digest, str(folder)]))
        assert files is not None
        if nodes is not None:
            transfer = nodes.transfer(loading.jobs)
            transfer.prepare(options.check)
        _commit(loading, files, run, on_mesh, sync, transfer)
    except BaseException:
        meta_model.undo()
        raise
    finally:
        if files is not None:
            files.close()
    return loading


def _open(folder: Path) -> Files:
    """The files of a folder that all ranks see. Raises: CheckpointError `missing-node-files` and those of
    `read_manifest`."""
    manifest = read_manifest(folder)
    if saving_nodes(manifest.about):  # otherwise a missing file is an error when it is needed
        check_files(manifest, [name for name in manifest.files if (folder / name).is_file()], str(folder), _NODES_FIX)
    return Files(folder, manifest)


_NODES_FIX = "shared=False loads folders of several nodes; or copy the files of all nodes into one folder"


def _open_on_nodes(
    folder: Path, run: Run, sync: RankSync, options: LoadOptions, error: ParallelizeError | None
) -> NodeFiles:
    """The files of all nodes, with the tensors inside plain values. Raises: CheckpointError, on every rank."""
    sync.agree(error)
    nodes = NodeFiles(folder, sync)
    try:
        nodes.receive_state(run, options.check)
    except BaseException:
        nodes.files.close()
        raise
    return nodes


def _targets(run: Run, on_mesh: ModelOnMesh) -> tuple[list[LocalTensor], ParallelizeError | None]:
    try:
        reshard_units(run.module)
        return targets(on_mesh), None
    except Exception as caught:
        return [], as_parallelize_error(caught)


def _all_names(on_mesh: ModelOnMesh, tensors: list[LocalTensor], sync: RankSync) -> set[str]:
    """Names of the tensors of the full model, which other pipeline stages have too."""
    names = [tensor.name for tensor in tensors]
    if on_mesh.cut is None:
        return set(names)
    return {name for stage in sync.all_gather(names if on_mesh.is_first else []) for name in stage}


def _check_same_checkpoint(ranks: Sequence[int], read: list[list[str]]) -> None:
    """`read`: (digest of the manifest, folder) of every rank."""
    if len({digest for digest, _ in read}) > 1:
        sources = [f"{folder} (manifest {digest[:16]})" for digest, folder in read]
        rows = ranks_by_value(list(zip(ranks, sources, strict=False)))
        fix = "pass the same folder on every rank, on a file system that all machines share"
        raise CheckpointError(Problem("other-checkpoint", "the ranks read different checkpoints", rows=rows, fix=fix))


def _read(
    loading: Loading, files: Files, run: Run, on_mesh: ModelOnMesh, meta_model: MetaModel, tensors: list[LocalTensor]
) -> None:
    """Match and read, without changing what is in use."""
    if meta_model.was_meta:
        meta_model.allocate(on_mesh.mesh.device_type if on_mesh.mesh is not None else None)
        tensors = targets(on_mesh)
    options = loading.options
    _plan_weights(loading, files, tensors, meta_model)
    for name, optimizer in run.optimizers.items():
        description = _saved_optimizer(loading.manifest, name, options.strict)
        if description is not None:
            restored, jobs = plan_optimizer(
                on_mesh, name, optimizer, description, files, strict=options.strict, resized=loading.resized
            )
            loading.optimizers.append(restored)
            loading.jobs += jobs
    prepare_jobs(files, loading.jobs, options.check, options.progress)
    _read_state(loading, files, run, on_mesh)


def _saved_optimizer(manifest: Manifest, name: str, strict: bool) -> dict[str, Any] | None:
    saved = manifest.state.get("optimizers", {})
    if name not in saved and strict:
        names = short_list(list(saved)) or "none"
        what = f"no state of an optimizer called {name!r} was saved; there: {names}"
        fix = "load without an optimizer, or with strict=False"
        raise CheckpointError(Problem("no-optimizer-state", what, fix=fix))
    return saved.get(name)


@dataclass(frozen=True)
class _Matching:
    """Tensors of a checkpoint and of a model, to be matched by name. `all_names`: the names of the full model.
    `resized`: how their vocabularies differ."""

    manifest: Manifest
    where: str
    tensors: list[LocalTensor]
    all_names: set[str]
    resized: ResizedVocabulary | None = None

    @property
    def saved(self) -> dict[str, SavedTensor]:
        return {name: saved for name, saved in self.manifest.tensors.items() if name.startswith("model/")}


def _resized(manifest: Manifest, on_mesh: ModelOnMesh, tensors: list[LocalTensor]) -> ResizedVocabulary | None:
    facts = on_mesh.cut.facts if on_mesh.cut is not None else None
    own = {_fqn(tensor.name): tensor.stored.shape for tensor in tensors}

    def own_shape(name: str) -> tuple[int, ...] | None:
        if facts is None or name not in facts.parameter_fqns:
            return own.get(on_mesh.canonical(name))
        return facts.parameters[facts.parameter_fqns[name]].shape

    def saved_shape(name: str) -> tuple[int, ...] | None:
        saved = manifest.tensors.get(f"model/{on_mesh.canonical(name)}")
        return saved.shape if saved is not None else None

    return resized_vocabulary(on_mesh.module, saved_shape, own_shape)


def _check_names(matching: _Matching, options: LoadOptions, on_meta: bool) -> None:
    """Report missing, unexpected and misshapen tensors, all at once."""
    saved, where, strict = matching.saved, matching.where, options.strict
    missing: list[str] = []
    unexpected: list[str] = []
    if strict or on_meta:  # a meta tensor that is not filled would have arbitrary values
        missing = [name for name in dict.fromkeys(tensor.name for tensor in matching.tensors) if name not in saved]
    if strict:
        unexpected = [name for name in saved if name not in matching.all_names]
    misshapen = [t for t in matching.tensors if t.name in saved and saved[t.name].shape != t.stored.shape]
    resized = matching.resized
    of_vocabulary = {t.name for t in misshapen if resized and resized.explains(saved[t.name].shape, t.stored.shape)}
    if options.resize_vocabulary:
        misshapen = [tensor for tensor in misshapen if tensor.name not in of_vocabulary]
        if on_meta and of_vocabulary and resized is not None:
            resized.refuse_without_values(where)
    problems = [_unmatched("missing-tensor", "was not saved", name, saved, where) for name in missing[:_MOST_REPORTED]]
    problems += [
        _unmatched("unexpected-tensor", "is not in this model", name, matching.all_names, where)
        for name in unexpected[:_MOST_REPORTED]
    ]
    for tensor in misshapen[:_MOST_REPORTED]:
        saved_shape, shape = list(saved[tensor.name].shape), list(tensor.stored.shape)
        what = f"{_fqn(tensor.name)} was saved as {saved_shape}, the model has {shape}"
        fix = "load it into the model that was saved"
        if tensor.name in of_vocabulary:
            fix += "; or resize_vocabulary=True, which reads the tokens that both have"
        problems.append(Problem("wrong-shape", what, where, fix=fix))
    rest = len(missing) + len(unexpected) + len(misshapen) - len(problems)
    if rest:
        problems.append(Problem("more-problems", f"and {rest} more of these kinds", where))
    if problems:
        raise CheckpointError(*problems)


_MOST_REPORTED = 10
"""Problems of a kind that are reported: finding similar names takes time."""


def _fqn(name: str) -> str:
    return name.removeprefix("model/")


def _unmatched(slug: str, what: str, name: str, known_names: Iterable[str], where: str) -> Problem:
    similar = near(_fqn(name), [_fqn(other) for other in known_names])
    fix = "load it into the model that was saved"
    if similar:
        fix = "did you mean " + " or ".join(f"`{other}`" for other in similar) + "?"
    return Problem(slug, f"{_fqn(name)} {what}", where, fix=fix + "; strict=False goes on without")


def _plan_weights(loading: Loading, files: Files, tensors: list[LocalTensor], meta_model: MetaModel) -> None:
    _check_dtypes(loading.manifest, tensors, loading.options.cast)
    for tensor in tensors:
        saved = loading.manifest.tensors.get(tensor.name)
        if saved is not None:
            local = tensor.stored.local
            if meta_model.was_meta:
                clear_padding(tensor.stored, local)
            else:
                loading.weights.append((tensor, local))
            loading.jobs += jobs_for(files, saved, tensor.stored, local, hidden=meta_model.was_meta)


def _check_dtypes(manifest: Manifest, tensors: list[LocalTensor], cast: bool) -> None:
    """Refuse dtypes that lose values. A weight may be narrower where the optimizer has a wider copy of it."""
    targets_of: dict[str, list[LocalTensor]] = {}
    for tensor in tensors:
        if tensor.name in manifest.tensors:
            targets_of.setdefault(tensor.name, []).append(tensor)
    lossy = [
        name
        for name, same_name in targets_of.items()
        if all(is_lossy(manifest.tensors[name].dtype, tensor.dtype) for tensor in same_name)
    ]
    lossy_integers = [name for name in lossy if not _all_floating(manifest.tensors[name], targets_of[name])]
    if lossy_integers or (lossy and not cast):
        refused = lossy_integers or lossy
        saved, tensor = manifest.tensors[refused[0]], targets_of[refused[0]][0]
        count = "1 tensor was" if len(refused) == 1 else f"{len(refused)} tensors were"
        what = (
            f"{count} saved in a wider dtype than the model keeps: {_fqn(refused[0])} {saved.dtype}, here "
            f"{tensor.dtype}"
        )
        fix = "cast=True accepts the loss; or widen the model first"
        raise CheckpointError(Problem("narrower-dtype", what, fix=fix))


def _all_floating(saved: SavedTensor, tensors: list[LocalTensor]) -> bool:
    """Whether all are floating-point: `cast` accepts a loss of precision only, not of integers."""
    codes = {saved.dtype, *(tensor.dtype for tensor in tensors)}
    return all(torch_dtype(code).is_floating_point for code in codes)


def _read_state(loading: Loading, files: Files, run: Run, on_mesh: ModelOnMesh) -> None:
    """Decode everything that is not a tensor, so that problems are found before anything is changed."""
    state = loading.manifest.state
    if loading.options.strict:
        _check_absent(run, state, str(files.folder))

    def tensors(key: str) -> T:
        return read_full(files, key, loading.options.check)

    loading.values = decode(state.get("values"), tensors, "values")
    for name, scheduler in run.schedulers.items():
        if name in (state.get("schedulers") or {}):
            check_scheduler(scheduler, state["schedulers"][name])
    if run.data is not None and state.get("data") is not None:
        saved_mesh = loading.manifest.about.get("mesh")
        loading.state["data"] = run_state.decoded_data(on_mesh, run.data, state["data"], tensors, saved_mesh)
    saved = state.get("user") or {}
    loading.state["user"] = {name: decode(saved[name], tensors, f"user.{name}") for name in run.user if name in saved}
    if run.streams is not None and state.get("streams"):
        run.streams.check_closed()
        loading.state["streams"] = run_state.decoded_streams(run.streams, state["streams"], tensors)
    if run.generators and state.get("generators"):
        same_mesh = loading.manifest.about.get("mesh") == mesh_of(on_mesh)
        loading.state["generators"] = run_state.decoded_generators(on_mesh, state["generators"], same_mesh, tensors)


def _check_absent(run: Run, state: dict[str, Any], where: str) -> None:
    """Raises: CheckpointError `missing-state` for state that is to be loaded, but was not saved."""
    absent = [name for name in run.user if name not in (state.get("user") or {})]
    absent += [name for name in run.schedulers if name not in (state.get("schedulers") or {})]
    absent += ["data"] if run.data is not None and state.get("data") is None else []
    absent += ["streams"] if run.streams is not None and not state.get("streams") else []
    if absent:
        what = f"no state of {short_list(absent)} was saved"
        raise CheckpointError(Problem("missing-state", what, where, fix="leave it out, or load with strict=False"))


def mesh_of(on_mesh: ModelOnMesh) -> list[list[Any]]:
    """The mesh as a manifest describes it."""
    return [[name, size] for name, size in on_mesh.spec.axes] if on_mesh.spec is not None else []


@torch.no_grad()
def _commit(
    loading: Loading, files: Files, run: Run, on_mesh: ModelOnMesh, sync: RankSync, transfer: Transfer | None
) -> None:
    """Change the live state. Objects of the user come first, because they may refuse their state."""
    error: ParallelizeError | None = None
    if run.schedulers or run.user or run.data is not None:
        try:
            _load_objects(loading, run)
        except Exception as caught:  # an object refused
            error = as_parallelize_error(caught)
        sync.agree(error)
    try:
        for tensor, local in loading.weights:
            clear_padding(tensor.stored, local)
        fill_jobs(files, loading.jobs)
    except Exception as caught:  # the disk failed between the two readings
        error = as_parallelize_error(caught)
    sync.agree(error)
    if transfer is not None:
        transfer.run(loading.options.progress)
    for _, local in loading.weights:
        torch.autograd.graph.increment_version(local)
    for restored in loading.optimizers:
        restored.apply()
    state, saved = loading.manifest.state, loading.state
    run_state.restore_position(on_mesh, run.pipeline, state.get("position") or {})
    if "streams" in saved and run.streams is not None:
        run.streams.load_state_dict(saved["streams"])
    if "generators" in saved:
        set_generators = saved["generators"]
        set_generators()


def _load_objects(loading: Loading, run: Run) -> None:
    schedulers = loading.manifest.state.get("schedulers") or {}
    for name, scheduler in run.schedulers.items():
        if name in schedulers:
            load_scheduler(scheduler, schedulers[name])
    if "data" in loading.state:
        run.data.load_state_dict(loading.state["data"])
    for name, state in loading.state.get("user", {}).items():
        run.user[name].load_state_dict(state)
