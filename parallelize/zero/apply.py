"""`shard_data`: the data axes of a mesh, by ZeRO stage. After the plan, before an optimiser is built.

| stage | each data rank holds of gradients | of optimiser state | of parameters |
|---|---|---|---|
| 0 | all | all | all |
| 1 | all | its part | all |
| 2 | its part | its part | all |
| 3 | its part | its part | its part (`fully_shard`) |

Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.errors import MeshError, ModelError, Problem
from parallelize.groups import Group, axis_group, mesh_spec
from parallelize.mesh import DATA_AXES, MeshSpec
from parallelize.pipeline.cut import cut_of
from parallelize.sharding import record_of
from parallelize.zero.fully import shard_fully
from parallelize.zero.reducer import BUCKET_BYTES, Managed, Reducer
from parallelize.zero.shards import Shard, split_spec

STAGES = (0, 1, 2, 3)


@dataclass
class DataRecord:
    """What `shard_data` did to a model; kept on its root.

    Attributes:
        zero: the stage. engine: keeps data ranks in step. shards: own rows of each parameter (stages 0 to 2).
        masters: float32 copies that the optimiser steps, where parameters are narrower.
        compute: the dtype of compute, where parameters are kept in a wider one (stage 3).
    """

    zero: int
    mesh: DeviceMesh
    engine: Any
    shards: list[Shard] = field(default_factory=list)
    masters: bool = False
    compute: torch.dtype | None = None

    def __deepcopy__(self, memo: dict) -> DataRecord:
        return self


def data_of(module: nn.Module) -> DataRecord | None:
    """What `shard_data` did to this model, or None."""
    return module.__dict__.get("_parallelize_data")


def shard_data(
    module: nn.Module,
    mesh: DeviceMesh,
    zero: int = 0,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    units: Sequence[str] | None = None,
    defer: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Keep the data-parallel ranks of a mesh in step, in place, and return the model.

    Gradients are SUMS over the axes dp_replicate, dp (or dp_shard) and cp: divide the loss by the global count of tokens,
    as `Pipeline.step` does. Parts lie over dp (or dp_shard); dp_replicate and cp hold copies.

    Args:
        module: plain, or after `parallelize_module`. Build the optimiser afterwards, by `build_optimizer`.
        zero: the stage, 0 to 3.
        dtype: of parameters and compute (bfloat16); the optimiser then steps float32 copies.
        reduce_dtype: of sums of gradients. Default: float32 where `dtype` is narrower, else the parameters'.
        units: for stage 3, patterns of the modules that are gathered as one. Default: the plan's, else its layers.
        defer: stages 2 and 3 reduce once a step of several backwards, rather than in each: fewer messages, and whole
            gradients (parameters x reduce_dtype bytes) are kept until then.

    Raises: MeshError `no-data-axis`; ModelError `bad-zero-stage`, `data-axes-taken`, `early-optimizer`.
    """
    spec = mesh_spec(mesh)
    _check(module, spec, zero)
    narrow = dtype is not None and dtype.itemsize < 4
    make_contiguous(module)
    if zero == 3:
        if dtype is not None and not narrow:  # `fully_shard` knows the dtype of compute alone
            cast_parameters(module, dtype)
        taken = (dtype, reduce_dtype, units, defer, reshard_after_forward)
        engine3 = shard_fully(module, mesh, _shard_axis(spec), *taken)
        module.__dict__["_parallelize_data"] = DataRecord(3, mesh, engine3, compute=dtype if narrow else None)
        return module
    shard = _shard_axis(spec) if zero else None
    group = Group(axis_group(mesh, shard)) if shard is not None else Group.alone()
    wider = reduce_dtype.itemsize if reduce_dtype is not None and dtype is None else 0
    narrow = narrow or any(p.is_floating_point() and p.dtype.itemsize < wider for p in module.parameters())
    shards = [_shard(one, mesh, shard, group, torch.float32 if narrow else None) for one in _managed(module)]
    if dtype is not None:
        cast_parameters(module, dtype)
    reduced = reduce_dtype or (torch.float32 if narrow else None)
    split = shard if zero == 2 and group.size > 1 else None
    options: dict[str, Any] = {"shard": group, "defer": defer} if split is not None else {}
    engine = _reducer(module, mesh, split, shards, reduced, bucket_bytes, options)
    module.__dict__["_parallelize_data"] = DataRecord(zero, mesh, engine, shards, narrow)
    record = module.__dict__["_parallelize_data"]
    for name, owner in module.named_modules():
        if owner._parameters:
            owner.register_load_state_dict_post_hook(partial(_after_load, record, f"{name}." if name else ""))
    return module


def _reducer(
    module: nn.Module,
    mesh: DeviceMesh,
    split: str | None,
    shards: list[Shard],
    dtype: torch.dtype | None,
    bucket_bytes: int,
    options: dict[str, Any],
) -> Reducer | None:
    """What sums gradients over the data axes, those beside `split` whole; None where nothing is to be summed or widened."""
    spec = mesh_spec(mesh)
    axes = [axis for axis in DATA_AXES if axis in spec.names and spec.size(axis) > 1]
    if not axes and dtype is None:
        return None
    whole = [axis for axis in axes if axis != split]
    groups = [Group(axis_group(mesh, *whole))] if whole else []
    managed = list(_managed(module))
    if split is not None:
        options = {**options, "specs": {id(one.param): one.spec for one in shards}}
    trained = [one for one in managed if one.param.requires_grad]
    reducer = Reducer(trained, groups, dtype, bucket_bytes=bucket_bytes, **options)
    reducer.unmanaged = [one for one in managed if not one.param.requires_grad]
    reducer.after = partial(_show_gradients, shards)
    return reducer


def _show_gradients(shards: list[Shard]) -> None:
    """Gradients of this step, also where the optimiser holds own rows: for clipping and scaling by `param_groups`."""
    for shard in shards:
        shard.refresh()


def _after_load(data: DataRecord, prefix: str, owner: nn.Module, _: Any) -> None:
    """Weights were loaded: float32 copies follow. Parameters must still be the ones that are reduced and stepped."""
    held = {id(parameter) for parameter in owner._parameters.values()}
    mine = [shard for shard in data.shards if shard.name.rpartition(".")[0] == prefix.rstrip(".")]
    replaced = [shard.name for shard in mine if id(shard.param) not in held]
    if replaced:
        what = f"{replaced[0]} and {len(replaced) - 1} more parameters were replaced after shard_data, which reduces the old"
        raise ModelError(Problem("parameter-replaced", what, fix="load_state_dict(..., assign=False)"))
    for shard in mine:
        shard.reload()


def _check(module: nn.Module, spec: MeshSpec, zero: int) -> None:
    if zero not in STAGES:
        raise ModelError(Problem("bad-zero-stage", f"there is no ZeRO stage {zero!r}", fix="0, 1, 2 or 3"))
    if zero > 0 and not {"dp", "dp_shard"} & set(spec.names):
        fix = 'name one: build_mesh("cuda", dp=4, tp=2); or zero=0'
        what = f"ZeRO {zero} divides state over dp, and the mesh {spec} has no such axis"
        raise MeshError(Problem("no-data-axis", what, fix=fix))
    if data_of(module) is not None:
        raise ModelError(Problem("data-axes-taken", "shard_data has been applied to this model", fix="apply it once"))
    refuse_early_optimizers(module)


def refuse_early_optimizers(module: nn.Module) -> None:
    """An optimiser that holds parameters which are about to be replaced would step nothing, in silence.

    Raises: ModelError `early-optimizer`.
    """
    held = {id(parameter) for parameter in module.parameters()}
    if any(True for _ in _optimizers_of(held)):
        gc.collect()  # one that nobody holds any more may still lie in a cycle
    for found in _optimizers_of(held):
        what = f"a {type(found).__name__} holds parameters of this model already, and would step them no more"
        fix = "build the optimiser afterwards, from the model that is returned"
        raise ModelError(Problem("early-optimizer", what, fix=fix))


def _optimizers_of(held: set[int]) -> Iterator[Any]:
    for found in gc.get_objects():
        # type() rather than isinstance(), which would wake lazy objects
        if issubclass(type(found), Optimizer) and any(id(parameter) in held for parameter in _stepped_by(found)):
            yield found


def _stepped_by(optimizer: Any) -> list[Any]:
    return [parameter for group in vars(optimizer).get("param_groups", ()) for parameter in group["params"]]


def _shard_axis(spec: MeshSpec) -> str:
    return "dp_shard" if "dp_shard" in spec.names else "dp"


def _managed(module: nn.Module) -> Iterator[Managed]:
    """Every parameter once, with the pipeline stage that its gradient comes from."""
    cut, record = cut_of(module), record_of(module)
    rows = record.resolved.parameters if record is not None else {}
    names: dict[int, list[str]] = {}
    params: dict[int, Any] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for key, found in names.items():
        stages = {cut.stages.stage_of(name) or 0 for name in found} if cut is not None else {0}
        row = next((rows[name] for name in found if name in rows), None)
        owed = row is not None and (row.partial or any(row.layout.shared(rank) for rank in range(row.layout.num_ranks)))
        owed = owed and record is not None and record.group.size > 1
        uses = len(found) if row is not None else 1
        yield Managed(found[0], params[key], max(stages), bool(owed) or len(stages) > 1, uses)


def _shard(one: Managed, mesh: DeviceMesh, axis: str | None, group: Group, master: torch.dtype | None) -> Shard:
    if one.param.ndim == 0:  # every rank steps a scalar
        return Shard(one.name, one.param, Group.alone(), None, master)
    spec = split_spec(one.param, mesh, axis) if axis is not None else None
    return Shard(one.name, one.param, group, spec, master)


def make_contiguous(module: nn.Module) -> None:
    """Parameters whose rows lie one after another, as gradients do: fused optimisers take both to lie alike."""

    def dense(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous() if isinstance(tensor, nn.Parameter) else tensor

    for owner in module.modules():
        if any(p is not None and not p.is_contiguous() for p in owner._parameters.values()):
            owner._apply(dense, recurse=False)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in another dtype; buffers (rotary tables) stay as they are."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to(dtype) if is_weight else tensor

    for owner in module.modules():
        if owner._parameters:
            owner._apply(cast, recurse=False)
