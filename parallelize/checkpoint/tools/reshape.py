"""Rewriting a checkpoint for another mesh, without a model, an accelerator or a process group, one tensor at a time.

A checkpoint can be loaded with any mesh. If it was written for that mesh, each rank reads one file sequentially.
Tensors are therefore sharded here as in a save: layers over pp, packed weights over tp by the plan, the data axis as in
ZeRO, and large tensors that several ranks store are split over these.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from parallelize.base.boxes import (
    Box,
    Part,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
    volume,
)
from parallelize.base.errors import CheckpointError, MeshError, Problem, ShapeError, did_you_mean
from parallelize.base.layout import Chunk, Layout, even_interval, packed, replicated
from parallelize.base.mesh import AXES, MeshSpec
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.format.device_pieces import empty, torch_dtype
from parallelize.checkpoint.format.folders import KEY as NODES
from parallelize.checkpoint.format.gather import GatheredCheckpoint, Source, gather, sources_of
from parallelize.checkpoint.format.header import SIZES
from parallelize.checkpoint.format.json_codec import stored_keys
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor, check_tensors
from parallelize.checkpoint.format.saved_slices import arranged, key_of
from parallelize.checkpoint.format.writer import TensorToWrite, write_tensors
from parallelize.checkpoint.hub.quantized_tensors import in_source_order
from parallelize.checkpoint.run.fill_tensors import Files, read_box
from parallelize.checkpoint.run.local_tensors import SPLIT_BYTES
from parallelize.plan.stages import split_evenly

T = torch.Tensor
ByteCallback = Callable[[int], None] | None
"""Called with the number of bytes after each write."""


@dataclass(frozen=True)
class TargetSharding:
    """The ranks of a mesh that write a tensor.

    Attributes:
        stage: pipeline stage.
        tp: layout over `tp`. None: replicated.
        data: axis over which ZeRO shards the tensor. None: replicated.
        first_rank_only: only the first rank writes it.
    """

    stage: int = 0
    tp: Layout | None = None
    data: str | None = None
    first_rank_only: bool = False


@dataclass(frozen=True)
class NewTensor:
    """A tensor of a new checkpoint.

    Attributes:
        saved: its entry in the manifest, without slices.
        sharding: the ranks that write it.
        read: returns the values of a box.
    """

    saved: SavedTensor
    sharding: TargetSharding
    read: Callable[[Box], T]


def reshape_checkpoint(
    source: Source,
    target: str | os.PathLike,
    mesh: MeshSpec | str,
    *,
    zero: int | None = None,
    step: int | None = None,
    progress: ByteCallback = None,
) -> Path:
    """Rewrite a checkpoint as a run on another mesh would have saved it. Memory: about one tensor.

    Weights, optimizer state and step stay bit-equal. Random generators belong to ranks: if the mesh changes, only those
    of the first rank are kept, and a load seeds the others from them.

    Args:
        source: folder of one step, or of a run; or several, the folders of nodes that share none.
        target: folder of a run, new or without this step.
        mesh: such as `pp=2,dp=4,tp=2`.
        zero: ZeRO stage of the new checkpoint. Default: that of the source.
        step: which step of a run. Default: the newest.
        progress: called with the number of bytes after each write.

    Returns: the published folder in `target`.
    Raises: CheckpointError: problems of the source, `missing-node-files`, `bad-target`, `already-saved`,
        `folder-in-use`, `write-failed`, `bad-zero-stage`, `too-many-stages`; MeshError `unknown-axis`, `no-data-axis`,
        `bad-mesh`. Nothing is left in `target` then.
    """
    checkpoint = gather(source, step)
    spec = spec_of(mesh)
    check_targets(Path(target), source, checkpoint)
    checkpoint.check_files()
    manifest = checkpoint.manifest
    stage = _resolve_zero(spec, zero, manifest.about.get("zero"))
    blank = _blank(manifest, spec, stage)
    shardings = target_shardings(manifest, spec, stage or 0)
    with Files(checkpoint.folders[0], manifest, folder_of=checkpoint.present()) as files:

        def reader(saved: SavedTensor) -> Callable[[Box], T]:
            def read(box: Box) -> T:
                out = empty(shape_of(box), torch_dtype(saved.dtype))
                read_box(files, saved, box, out)
                return out

            return read

        tensors = [
            NewTensor(saved, shardings[name], reader(saved)) for name, saved in _used_tensors(manifest, blank).items()
        ]
        return write_run(Path(target), blank, spec, tensors, progress)


def spec_of(mesh: MeshSpec | str) -> MeshSpec:
    """Parse a mesh. Raises: MeshError `unknown-axis`, and those of `MeshSpec`."""
    spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
    for axis in spec.names:
        if axis not in AXES:
            what = f"no tensor is sharded over an axis {axis!r}"
            raise MeshError(Problem("unknown-axis", what, fix=did_you_mean(axis, AXES)))
    return spec


def check_targets(target: Path, source: Source, checkpoint: GatheredCheckpoint) -> None:
    """Raises: CheckpointError `bad-target` if the target is inside a folder that was named, or of the step."""
    for folder in checkpoint.folders:
        check_target(target, *sources_of(source), folder)


def check_target(target: Path, *sources: Path) -> None:
    """Raises: CheckpointError `bad-target` if the target is inside a folder that is read."""
    target_path = target.resolve()
    for source in {path.resolve() for path in sources}:
        if source in target_path.parents or (target_path == source and target_path == sources[-1].resolve()):
            fix = "write to another folder"
            raise CheckpointError(Problem("bad-target", f"is inside {source}, which is read", str(target), fix=fix))


def _resolve_zero(mesh: MeshSpec, requested: int | None, saved: int | None) -> int | None:
    """The ZeRO stage of the new checkpoint; None without a data axis. Raises: MeshError `no-data-axis`, CheckpointError
    `bad-zero-stage`."""
    if requested not in (None, 0, 1, 2, 3):
        raise CheckpointError(Problem("bad-zero-stage", f"{requested!r} is not a ZeRO stage", fix="use 0, 1, 2 or 3"))
    if requested and data_axis(mesh) is None:
        fix = "name an axis dp (or dp_shard), or use --zero 0"
        raise MeshError(Problem("no-data-axis", f"ZeRO {requested} needs a data axis, and the mesh has none", fix=fix))
    if requested is not None:
        return requested
    return saved if data_axis(mesh) is not None else None


def data_axis(mesh: MeshSpec) -> str | None:
    """The axis over which ZeRO shards."""
    return next((axis for axis in ("dp_shard", "dp") if axis in mesh.names), None)


def _blank(manifest: Manifest, mesh: MeshSpec, zero: int | None) -> Manifest:
    """The new manifest, without files and tensors."""
    about = {key: value for key, value in manifest.about.items() if key != NODES}
    state = dict(manifest.state)
    about |= {"mesh": [list(axis) for axis in mesh.axes], "world_size": mesh.world_size, "zero": zero}
    about |= {"reshaped_from": manifest.about.get("mesh"), "reshaped_at": now()}
    if about["mesh"] != manifest.about.get("mesh") and state.get("generators"):
        state["generators"] = {rank: value for rank, value in state["generators"].items() if rank == "0"}
    return replace(manifest, about=about, state=state, files={}, tensors={})


def now() -> str:
    """UTC, in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _used_tensors(manifest: Manifest, blank: Manifest) -> dict[str, SavedTensor]:
    """The tensors of the new checkpoint: all but those of state values that it does not contain."""
    used = set(stored_keys(blank.state))
    return {name: saved for name, saved in manifest.tensors.items() if not name.startswith("state/") or name in used}


# -- sharding ----------------------------------------------------------------------------------------------------------


def target_shardings(manifest: Manifest, mesh: MeshSpec, zero: int) -> dict[str, TargetSharding]:
    """Name -> sharding of every tensor of a checkpoint."""
    weights = {name: saved for name, saved in manifest.tensors.items() if name.startswith("model/")}
    stages = _stage_of_weights(weights, manifest.about.get("units") or [], _size(mesh, "pp"))
    axis, tp = data_axis(mesh), _size(mesh, "tp") if "tp" in mesh.names else None
    shardings = {name: TargetSharding(first_rank_only=True) for name in manifest.tensors}
    for name, saved in weights.items():
        # a float32 copy (master weight) is sharded as the moments are
        is_sharded = zero == 3 or (zero > 0 and "compute" in saved.about)
        shardings[name] = TargetSharding(stages[name], _tp_layout(saved, tp), axis if is_sharded else None)
    for optimizer, record in (manifest.state.get("optimizers") or {}).items():
        for name, state in record["state"].items():
            weight = weights.get(f"model/{name}")
            for key in state["tensors"] if weight is not None else ():
                moment = manifest.tensors.get(f"{optimizer}/{name}/{key}")
                if moment is not None and weight is not None and moment.shape == weight.shape:
                    shardings[moment.name] = replace(shardings[weight.name], data=axis if zero else None)
    return shardings


def _size(mesh: MeshSpec, axis: str) -> int:
    return mesh.size(axis) if axis in mesh.names else 1


def _stage_of_weights(weights: Mapping[str, SavedTensor], units: Sequence[str], num_stages: int) -> dict[str, int]:
    """Name -> pipeline stage. Consecutive layers (`units`) form a stage, so that the largest stage has the fewest
    bytes. Weights outside of all layers are on the first stage.

    Raises: CheckpointError `too-many-stages`.
    """
    if units and num_stages > len(units):
        what = f"{num_stages} stages need as many layers, and the model has {len(units)}"
        raise CheckpointError(Problem("too-many-stages", what, fix=f"use pp={len(units)} or less"))
    index_of = {unit: index for index, unit in enumerate(units)}
    costs = [0.0] * len(units)
    first_unit: dict[str, int] = {}
    for name, saved in weights.items():
        names = saved.about.get("names") or [name.removeprefix("model/")]
        indices = [index_of[unit] for fqn in names if (unit := _unit_of(fqn, index_of)) is not None]
        first_unit[name] = min(indices, default=0)
        if indices:
            costs[first_unit[name]] += saved.num_bytes
    starts = split_evenly(costs, num_stages) if units else (0,)
    return {
        name: max(stage for stage, start in enumerate(starts) if start <= index) for name, index in first_unit.items()
    }


def _unit_of(name: str, units: Mapping[str, int]) -> str | None:
    """The unit that a name belongs to: the name itself, or its innermost ancestor that is a unit."""
    while name:
        if name in units:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in units else None


def _tp_layout(saved: SavedTensor, tp: int | None) -> Layout | None:
    """The layout of the plan of the run that saved it. None if there was none, or it cannot be used with `tp` ranks."""
    if tp is None or "cut" not in saved.about:
        return None
    try:
        dim, rows = saved.about["cut"]
        chunks = [Chunk(size, units, bool(replicable)) for size, units, replicable in rows]
        is_valid = sum(chunk.size for chunk in chunks) == saved.shape[dim]
        is_valid = is_valid and all(chunk.units is None or chunk.size % chunk.units == 0 for chunk in chunks)
        return packed(saved.shape, dim, tp, chunks) if is_valid else None
    except (ShapeError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None


def written_boxes(
    name: str, shape: tuple[int, ...], item_bytes: int, sharding: TargetSharding, mesh: MeshSpec
) -> Iterator[tuple[int, Box]]:
    """(rank, box) of all boxes of a tensor that are written: each element once."""
    layout = sharding.tp or replicated(shape, 1)
    data = sharding.data if shape and sharding.data in mesh.names else None
    num_data = mesh.size(data) if data is not None else 1
    used = {"pp"} | ({"tp"} if sharding.tp is not None else set()) | ({data} if data is not None else set())
    replicated_axes = [(axis, size) for axis, size in mesh.axes if axis not in used]
    copies = 1 if sharding.first_rank_only else math.prod(size for _, size in replicated_axes)
    for tp_rank in range(layout.num_ranks):
        for data_rank in range(num_data):
            fixed = {"pp": sharding.stage, "tp": tp_rank, data: data_rank}
            for box in _boxes(layout, tp_rank, data_rank, num_data):
                for copy, part in _split_over_copies(name, box, item_bytes, copies):
                    coordinates = fixed | _coordinates(copy, replicated_axes)
                    yield mesh.rank(**{axis: coordinates[axis] for axis in mesh.names}), part


def _boxes(layout: Layout, tp_rank: int, data_rank: int, num_data: int) -> Iterator[Box]:
    """The boxes that a rank of `tp` owns, restricted to the rows of its local tensor that belong to `data_rank`."""
    local = list(layout.local_shape(tp_rank))
    if layout.dim == 0 and not layout.is_canonical:
        local[0] = layout.stored_local_size
    window = [(0, size) for size in local]
    if window:
        window[0] = even_interval(local[0], num_data, data_rank)
    owned = layout.owned[tp_rank] if layout.dim is not None else ((0, 0),)
    for pair, interval in zip(layout.slices(tp_rank), owned, strict=True):
        if layout.dim is not None and layout.holders(tp_rank, interval)[0] != tp_rank:
            continue
        part = pair.in_window(window)
        if part is not None:
            yield part.box


def _split_over_copies(name: str, box: Box, item_bytes: int, copies: int) -> Iterator[tuple[int, Box]]:
    """(index of the rank among those that store the box, part of the box that it writes), as in `LocalTensor.owned`."""
    rows = box[0][1] - box[0][0] if box else 1
    parts = max(1, min(copies, volume(box) * item_bytes // SPLIT_BYTES, rows)) if box else 1
    for number in range(parts):
        copy = (number + zlib.crc32(name.encode())) % copies
        if parts == 1:
            yield copy, box
            return
        a, b = even_interval(rows, parts, number)
        if b > a:
            yield copy, ((box[0][0] + a, box[0][0] + b), *box[1:])


def _coordinates(index: int, axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Axis -> rank, of a row-major index."""
    coordinates = {}
    for axis, size in reversed(axes):
        index, coordinates[axis] = divmod(index, size)
    return coordinates


# -- writing -----------------------------------------------------------------------------------------------------------


def write_run(
    root: Path, blank: Manifest, mesh: MeshSpec, tensors: Iterable[NewTensor], progress: ByteCallback = None
) -> Path:
    """Write and publish a checkpoint, one file at a time.

    Args:
        root: folder of the run.
        blank: the manifest, without files and tensors.
        mesh: the mesh of the new checkpoint.
        tensors: the tensors to write.
        progress: called with the number of bytes after each write.

    Raises: as `reshape_checkpoint`. Nothing is left then.
    """
    by_rank: dict[int, list[TensorToWrite]] = {}
    saved: dict[str, SavedTensor] = {}
    for tensor in tensors:
        saved[tensor.saved.name] = _add_slices(tensor, mesh, by_rank)
    check_tensors(saved.values(), str(root))
    metadata = {"format": "pt", "step": str(blank.step)}
    with _writing(root, blank.step) as writing:
        files = {}
        for rank in sorted(by_rank):
            name = folders.rank_file(rank)
            files[name] = write_tensors(writing / name, by_rank[rank], metadata, progress)
        manifest = replace(blank, files=files, tensors=saved)
        return folders.publish(root, writing, blank.step, manifest.to_bytes())


def _add_slices(tensor: NewTensor, mesh: MeshSpec, by_rank: dict[int, list[TensorToWrite]]) -> SavedTensor:
    """Add the slices of a tensor to the files of the ranks. Returns its entry in the manifest."""
    saved, slices = tensor.saved, []
    num_slices: dict[int, int] = {}
    for rank, box in written_boxes(saved.name, saved.shape, SIZES[saved.dtype], tensor.sharding, mesh):
        number = num_slices.get(rank, 0)
        num_slices[rank] = number + 1
        key = key_of(saved.name, number)
        by_rank.setdefault(rank, []).append(TensorToWrite(key, saved.dtype, shape_of(box), partial(tensor.read, box)))
        slices.append((folders.rank_file(rank), key, box))
    return replace(saved, slices=arranged(saved.shape, slices))


@contextmanager
def _writing(root: Path, step: int) -> Iterator[Path]:
    """A folder for the files of a step. After an error it is removed, and so is `root` if it did not exist before."""
    is_new, writing = not root.exists(), None
    lock = folders.Lock(root)
    try:
        writing = folders.begin(root, step)
        yield writing
    except BaseException:
        folders.abandon(writing)
        if is_new:
            disk.remove_folder(root)
        raise
    finally:
        lock.release()


# -- assembly --------------------------------------------------------------------------------------------------------
# A box of a tensor, assembled from the parts of other tensors that its values are read from.


ReadBox = Callable[[str, Box, T], None]
"""(name of a tensor, box, view to fill)"""


def assembled(box: Box, dtype: torch.dtype, parts: Sequence[Part], read: ReadBox) -> T:
    """The values of a box of a tensor, read from the sources of its parts."""
    out = empty(shape_of(box), dtype)
    for part in parts:
        shared = intersection(box, part.target)
        if shared is not None:
            view = out[slices_of(relative_to(shared, starts(box)))]
            read(part.source, part.source_box(shared), in_source_order(view, part))
    return out
