"""A checkpoint cut anew for another mesh, without a model, an accelerator or a process group: one tensor at a time.

Loading works from any cut; one that fits the mesh lets each rank read one file from begin to end. So the cut is that of a
save: over pp by units, over tp as the plan cuts, over the data axis as ZeRO does, and copies share out what is large.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint import disk, folders
from parallelize.checkpoint.boxes import Box, box_of, shape_of, volume
from parallelize.checkpoint.dtypes import SIZES
from parallelize.checkpoint.fill import Files, read_box
from parallelize.checkpoint.held import SPLIT_BYTES
from parallelize.checkpoint.manifest import Manifest, Piece, Saved, check_tensors, read_manifest
from parallelize.checkpoint.memory import empty, torch_dtype
from parallelize.checkpoint.writer import Outgoing, write_tensors
from parallelize.errors import CheckpointError, MeshError, Problem, ShapeError, did_you_mean
from parallelize.layout import Chunk, Layout, even_interval, packed, replicated
from parallelize.mesh import AXES, MeshSpec
from parallelize.plan.stages import split_evenly

T = torch.Tensor
Told = Callable[[int], None] | None
"""Is told of bytes written."""


@dataclass(frozen=True)
class Cut:
    """Who keeps a tensor on a mesh: a stage of the pipeline, parts over `tp`, parts over a data axis, or the first rank."""

    stage: int = 0
    tp: Layout | None = None
    data: str | None = None
    whole: bool = False


@dataclass(frozen=True)
class Incoming:
    """A tensor of a new checkpoint: what the manifest says of it (pieces are filled in), its cut, and how a box is read."""

    saved: Saved
    cut: Cut
    read: Callable[[Box], T]


def reshape_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    mesh: MeshSpec | str,
    *,
    zero: int | None = None,
    step: int | None = None,
    progress: Told = None,
) -> Path:
    """Write a checkpoint as a run on another mesh would have written it. Memory: about one tensor.

    Weights, optimiser and position stay bit for bit. Generators are those of single ranks: where the mesh changes, the first
    rank's stay, from which a load seeds the others.

    Args:
        source: a step's folder, or a run's: then the newest, or `step`. target: a run's folder, new or without this step.
        mesh: as `pp=2,dp=4,tp=2`. zero: ZeRO stage for which to cut; default: the one that saved.

    Returns: the published folder in `target`.
    Raises: CheckpointError: what is wrong with the source, `bad-target`, `already-saved`, `folder-in-use`, `write-failed`,
        `too-many-stages`; MeshError. Nothing is left in `target` then.
    """
    folder = folders.resolve(source, step)
    spec = spec_of(mesh)
    check_target(Path(target), Path(source), folder)
    manifest = read_manifest(folder)
    stage = _zero_stage(spec, zero, manifest.about.get("zero"))
    blank = _blank(manifest, spec, stage)
    cuts = cuts_for(manifest, spec, stage or 0)
    with Files(folder, manifest) as files:

        def reader(saved: Saved) -> Callable[[Box], T]:
            def read(box: Box) -> T:
                out = empty(shape_of(box), torch_dtype(saved.dtype))
                read_box(files, saved, box, out)
                return out

            return read

        tensors = [Incoming(saved, cuts[name], reader(saved)) for name, saved in _kept(manifest, blank).items()]
        return write_run(Path(target), blank, spec, tensors, progress)


def spec_of(mesh: MeshSpec | str) -> MeshSpec:
    """Raises: MeshError `unknown-axis`, and of `MeshSpec`."""
    spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
    for axis in spec.names:
        if axis not in AXES:
            what = f"a mesh has no axis {axis!r} for which anything is cut"
            raise MeshError(Problem("unknown-axis", what, fix=did_you_mean(axis, AXES)))
    return spec


def check_target(target: Path, *sources: Path) -> None:
    """Raises: CheckpointError `bad-target` for a folder in one that is read."""
    there = target.resolve()
    for source in {path.resolve() for path in sources}:
        if source in there.parents or (there == source and there == sources[-1].resolve()):
            fix = "write to another folder"
            raise CheckpointError(Problem("bad-target", f"lies in {source}, which is read", str(target), fix=fix))


def _zero_stage(mesh: MeshSpec, asked: int | None, saved: int | None) -> int | None:
    """Raises: MeshError `no-data-axis`, CheckpointError `bad-zero-stage`."""
    if asked not in (None, 0, 1, 2, 3):
        raise CheckpointError(Problem("bad-zero-stage", f"{asked!r} is no stage of ZeRO", fix="give 0, 1, 2 or 3"))
    if asked and data_axis(mesh) is None:
        fix = "name an axis dp (or dp_shard), or take --zero 0"
        raise MeshError(Problem("no-data-axis", f"ZeRO {asked} needs an axis to cut over, and has none", fix=fix))
    return asked if asked is not None else saved if data_axis(mesh) is not None else None


def data_axis(mesh: MeshSpec) -> str | None:
    """The axis over which ZeRO cuts."""
    return next((axis for axis in ("dp_shard", "dp") if axis in mesh.names), None)


def _blank(manifest: Manifest, mesh: MeshSpec, zero: int | None) -> Manifest:
    """The new manifest, without files and tensors."""
    about, state = dict(manifest.about), dict(manifest.state)
    about |= {"mesh": [list(axis) for axis in mesh.axes], "world_size": mesh.world_size, "zero": zero}
    about |= {"reshaped_from": manifest.about.get("mesh"), "reshaped_at": now()}
    if about["mesh"] != manifest.about.get("mesh") and state.get("generators"):
        state["generators"] = {rank: one for rank, one in state["generators"].items() if rank == "0"}
    return replace(manifest, about=about, state=state, files={}, tensors={})


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _kept(manifest: Manifest, blank: Manifest) -> dict[str, Saved]:
    """All tensors but those of values that are not kept."""
    used = set(_stored_keys(blank.state))
    return {name: saved for name, saved in manifest.tensors.items() if not name.startswith("state/") or name in used}


def _stored_keys(value: Any) -> Iterator[str]:
    """Names of the tensors that encoded values refer to."""
    if isinstance(value, dict) and value.get("$") == "stored_tensor":
        yield str(value.get("key"))
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _stored_keys(one)


# -- who keeps what -------------------------------------------------------------------------------------------------------


def cuts_for(manifest: Manifest, mesh: MeshSpec, zero: int) -> dict[str, Cut]:
    """Name -> cut of every tensor of a checkpoint."""
    weights = {name: saved for name, saved in manifest.tensors.items() if name.startswith("model/")}
    stages = _stages(weights, manifest.about.get("units") or [], _size(mesh, "pp"))
    axis, tp = data_axis(mesh), _size(mesh, "tp") if "tp" in mesh.names else None
    cuts = {name: Cut(whole=True) for name in manifest.tensors}
    for name, saved in weights.items():
        is_cut = zero == 3 or (zero > 0 and "compute" in saved.about)  # a float32 copy lies where the moments lie
        cuts[name] = Cut(stages[name], _tp_layout(saved, tp), axis if is_cut else None)
    for called, share in (manifest.state.get("optimizers") or {}).items():
        for name, state in share["state"].items():
            above = weights.get(f"model/{name}")
            for key in state["tensors"] if above is not None else ():
                moment = manifest.tensors.get(f"{called}/{name}/{key}")
                if moment is not None and above is not None and moment.shape == above.shape:
                    cuts[moment.name] = replace(cuts[above.name], data=axis if zero else None)
    return cuts


def _size(mesh: MeshSpec, axis: str) -> int:
    return mesh.size(axis) if axis in mesh.names else 1


def _stages(weights: Mapping[str, Saved], units: Sequence[str], num_stages: int) -> dict[str, int]:
    """Name -> pipeline stage: runs of units, the bytes of the largest as few as can be. What is of no unit: the first.

    Raises: CheckpointError `too-many-stages`.
    """
    if units and num_stages > len(units):
        what = f"{num_stages} stages need as many units, and the model has {len(units)}"
        raise CheckpointError(Problem("too-many-stages", what, fix=f"take pp={len(units)} or less"))
    number = {unit: place for place, unit in enumerate(units)}
    costs = [0.0] * len(units)
    places: dict[str, list[int]] = {}
    for name, saved in weights.items():
        names = saved.about.get("names") or [name.removeprefix("model/")]
        found = sorted({number[unit] for one in names if (unit := _unit_of(one, number)) is not None})
        places[name] = found
        for place in found[:1]:
            costs[place] += saved.num_bytes
    starts = split_evenly(costs, num_stages) if units else (0,)
    return {
        name: max(stage for stage, start in enumerate(starts) if start <= (found[0] if found else 0))
        for name, found in places.items()
    }


def _unit_of(name: str, units: Mapping[str, int]) -> str | None:
    """The unit that is the name, or stands above it."""
    while name:
        if name in units:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in units else None


def _tp_layout(saved: Saved, tp: int | None) -> Layout | None:
    """As the plan that saved it cuts it; None where it said nothing, or nothing that fits so many ranks."""
    if tp is None or "cut" not in saved.about:
        return None
    try:
        dim, given = saved.about["cut"]
        chunks = [Chunk(size, units, bool(replicable)) for size, units, replicable in given]
        whole = sum(chunk.size for chunk in chunks) == saved.shape[dim]
        fits = whole and all(chunk.units is None or chunk.size % chunk.units == 0 for chunk in chunks)
        return packed(saved.shape, dim, tp, chunks) if fits else None
    except (ShapeError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None


def owners(name: str, shape: tuple[int, ...], item_bytes: int, cut: Cut, mesh: MeshSpec) -> Iterator[tuple[int, Box]]:
    """(rank, box) of everything that is to be written of a tensor: each element once."""
    layout = cut.tp or replicated(shape, 1)
    data = cut.data if shape and cut.data in mesh.names else None
    used = {"pp"} | ({"tp"} if cut.tp is not None else set()) | ({data} if data is not None else set())
    rest = [(axis, size) for axis, size in mesh.axes if axis not in used]
    copies = math.prod(size for _, size in rest)
    for tp_rank in range(layout.num_ranks):
        for data_rank in range(mesh.size(data) if data is not None else 1):
            fixed = {"pp": cut.stage, "tp": tp_rank, data: data_rank}
            for box in _boxes(layout, tp_rank, data_rank, mesh.size(data) if data is not None else 1):
                for copy, part in _shared_out(name, box, item_bytes, 1 if cut.whole else copies):
                    where = fixed | _coordinates(copy if not cut.whole else 0, rest)
                    yield mesh.rank(**{axis: where[axis] for axis in mesh.names}), part


def _boxes(layout: Layout, tp_rank: int, data_rank: int, num_data: int) -> Iterator[Box]:
    """What a rank of `tp` writes, as far as it lies in its part of the local tensor's rows."""
    local = list(layout.local_shape(tp_rank))
    if layout.dim == 0 and not layout.is_canonical:
        local[0] = layout.stored_local_size
    start, stop = even_interval(local[0], num_data, data_rank) if local else (0, 1)
    owned = layout.owned[tp_rank] if layout.dim is not None else ((0, 0),)
    for pair, interval in zip(layout.slices(tp_rank), owned, strict=True):
        if layout.dim is not None and layout.holders(interval)[0] != tp_rank:
            continue
        box = box_of(pair.full)
        if box:
            a, b = max(pair.local[0].start, start), min(pair.local[0].stop, stop)
            first = box[0][0] - pair.local[0].start
            box = ((first + a, first + max(a, b)), *box[1:])
        if volume(box):
            yield box


def _shared_out(name: str, box: Box, item_bytes: int, copies: int) -> Iterator[tuple[int, Box]]:
    """(copy, part) of a box that several ranks hold, as `Held.owned` shares it out."""
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


def _coordinates(place: int, axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    found = {}
    for axis, size in reversed(axes):
        place, found[axis] = divmod(place, size)
    return found


# -- writing --------------------------------------------------------------------------------------------------------------


def write_run(root: Path, blank: Manifest, mesh: MeshSpec, tensors: Iterable[Incoming], progress: Told = None) -> Path:
    """Write and publish a checkpoint, file after file. Raises: as `reshape_checkpoint`; nothing is left then."""
    shares: dict[int, list[Outgoing]] = {}
    placed: dict[str, Saved] = {}
    for one in tensors:
        placed[one.saved.name] = _place(one, mesh, shares)
    check_tensors(placed.values(), str(root))
    metadata = {"format": "pt", "step": str(blank.step)}
    with _writing(root, blank.step) as writing:
        named = {file_of(rank): shares[rank] for rank in sorted(shares)}
        files = {name: write_tensors(writing / name, share, metadata, progress) for name, share in named.items()}
        whole = replace(blank, files=files, tensors=placed)
        return folders.publish(root, writing, blank.step, whole.to_bytes())


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _place(one: Incoming, mesh: MeshSpec, shares: dict[int, list[Outgoing]]) -> Saved:
    """Add a tensor's pieces to the ranks' files."""
    saved, pieces = one.saved, []
    numbers: dict[int, int] = {}
    for rank, box in owners(saved.name, saved.shape, SIZES[saved.dtype], one.cut, mesh):
        number = numbers[rank] = numbers.get(rank, -1) + 1
        key = saved.name if number == 0 else f"{saved.name}@{number}"
        shares.setdefault(rank, []).append(Outgoing(key, saved.dtype, shape_of(box), lambda box=box: one.read(box)))
        pieces.append(Piece(file_of(rank), key, box))
    return replace(saved, pieces=tuple(pieces))


@contextmanager
def _writing(root: Path, step: int) -> Iterator[Path]:
    """A folder for a step's files. After an error it is gone, and `root` too if it was made for it."""
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
