"""The parameters of a model as ZeRO 0 to 2 sees them: which ranks sum each gradient, and what an optimizer steps of
each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.zero.data_ranks import DataGroups, DataOptions, DataRanks, DataRanksOf
from parallelize.axes.zero.optimizer_shards import OptimizerShard, split_spec
from parallelize.axes.zero.reducer import ReducedParameter
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.plan.model_facts import named_once
from parallelize.plan.parameter_shards import shards_of
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.records import pipeline_cut, record_of
from parallelize.state.sharding import rows_by_name


def reduced_parameters(
    module: nn.Module, resolved: ResolvedPlan, ranks_of: DataRanksOf
) -> Iterator[tuple[ReducedParameter, DataRanks]]:
    """Every parameter once, with the pipeline stage that its gradient comes from, and its data ranks."""
    cut, record = pipeline_cut(module), record_of(module)
    planned = rows_by_name(record) if record is not None else {}
    local = {
        name: shard for shard in shards_of(resolved, cut.group.rank if cut is not None else 0) for name in shard.names
    }
    groups_of: dict[DataRanks, DataGroups] = {}  # a search among the process's groups, for each of the few kinds
    for names, param in named_once(module):
        shard = next((local[name] for name in names if name in local), None)
        ranks = ranks_of([planned[name] for name in names if name in planned])
        if shard is None:  # added after the plan was applied
            reduced = ReducedParameter(names[0], param, resolved.stage_of(names[0]))
        else:
            uses = len(names) if shard.name in planned else 1
            reduced = ReducedParameter(names[0], param, shard.stage, shard.late, uses)
        if ranks not in groups_of:
            groups_of[ranks] = ranks.gradient_groups
        yield replace(reduced, groups=groups_of[ranks]), ranks


def optimizer_shard(parameter: ReducedParameter, ranks: DataRanks, master: torch.dtype | None) -> OptimizerShard:
    """This rank's rows of a parameter. master: the dtype of a wider copy, or None."""
    if parameter.param.ndim == 0:  # every rank steps a scalar
        return OptimizerShard(parameter.name, parameter.param, Group.alone(), None, master)
    spec = split_spec(parameter.param, ranks.mesh, ranks.shard_axis) if ranks.zero else None
    return OptimizerShard(parameter.name, parameter.param, ranks.split_group, spec, master, parameter.is_split)


def stepped_in_shards(shard: OptimizerShard, zero: int) -> bool:
    """Whether no optimizer but that of `build_optimizer` can step a parameter itself."""
    return shard.has_master or (zero == 2 and shard.group.size > 1)


def master_dtype_of(parameter: Any, options: DataOptions, master: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the copy that the optimizer steps: float64 parameters keep theirs, where compute is narrower."""
    if parameter.dtype != torch.float64:
        return master
    return torch.float64 if options.low_precision else None


class RefusesCasts:
    """Before a forward: the parameters still have the dtype and device of the buffers in which gradients are summed."""

    def __init__(self, shards: Sequence[OptimizerShard]):
        self.expected: list[tuple[str, Any, torch.dtype, torch.device]] = []
        self.add(shards)

    def add(self, shards: Sequence[OptimizerShard]) -> None:
        """Buffers were made for these as they are now."""
        self.expected += [(shard.name, shard.param, shard.param.dtype, shard.param.device) for shard in shards]

    def drop(self, ids: set[int]) -> None:
        """These parameters are the model's no more. ids: theirs."""
        self.expected = [item for item in self.expected if id(item[1]) not in ids]

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, parameter, dtype, device in self.expected:
            if parameter.dtype is not dtype or parameter.device != device:
                now = f"{parameter.dtype} on {parameter.device}"
                what = f"{name} is {now}; it was {dtype} on {device} when shard_data made buffers for its gradient"
                fix = "cast and move the model before shard_data, or give it dtype="
                raise ModelError(Problem("cast-after-sharding", what, fix=fix))

    def __deepcopy__(self, memo: dict) -> RefusesCasts:
        return RefusesCasts(())


def cast_parameters(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of modules; buffers (rotary tables) keep their dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to(dtype) if is_weight else tensor

    for module in modules:
        if module._parameters:
            module._apply(cast, recurse=False)
