"""ZeRO 3: PyTorch's `fully_shard`, by the plan's units, with gradients that are sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem, did_you_mean
from parallelize.fuse_loss import deferred_heads, watch_writes
from parallelize.groups import axis_group, mesh_spec
from parallelize.parameters import SHARED
from parallelize.pipeline.cut import Cut, cut_of
from parallelize.plan.choose import plan_or_none
from parallelize.plan.pattern import matches
from parallelize.sharding import record_of, shared_of_parameters


class FullyShardedData:
    """The words of an engine, for a model under `fully_shard`.

    A backward of one stage must not be split: its halves would gather and reduce twice.
    """

    splits_backward = False

    def __init__(self, module: nn.Module, units: list[Any], stages: dict[int, int | None], defer: bool):
        self.module, self.units, self.defer = module, units, defer
        self.stages = stages  # id of a unit -> its pipeline stage

    def hold(self, by_hand: bool = False) -> None:
        """Only a deferred reduction waits for the last backward."""
        if self.defer:
            for unit in self.units:
                unit.set_requires_gradient_sync(False, recurse=False)

    def release(self, stage: int) -> None:
        for unit in self.units:
            if self.defer and self.stages.get(id(unit), stage) in (stage, None):
                unit.set_requires_gradient_sync(True, recurse=False)

    def flush(self, stage: int) -> None:
        """`fully_shard` reduces in backward."""

    def finish(self) -> None:
        """`fully_shard` has waited."""

    def reset(self) -> None:
        """What a failed forward or backward has left half done is let go."""
        for unit in self.units:
            unit.set_requires_gradient_sync(True, recurse=False)
        again: Any = getattr(self.module, "reset_iter_state", None)  # since 2.13
        if again is not None:
            again()
        for unit in self.units:
            private.forget_unsharded_gradients(unit)
            unit.reshard()


def shard_fully(
    module: nn.Module,
    mesh: DeviceMesh,
    axis: str,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    patterns: Sequence[str] | None,
    defer: bool,
    reshard_after_forward: bool,
) -> FullyShardedData:
    """Apply `fully_shard` to each unit and to the rest. `dp_replicate` x `axis` is hybrid sharding."""
    spec = mesh_spec(mesh)
    data = mesh["dp_replicate", axis] if "dp_replicate" in spec.names else mesh[axis]
    cut = cut_of(module)
    names = _units(module, patterns, cut)
    scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars:
        what = f"{scalars[0]} is a scalar, which `fully_shard` cannot split"
        raise ModelError(Problem("scalar-parameter", what, fix="make it a tensor of one element, or use zero=2"))
    narrow = dtype is not None and dtype.itemsize < 4
    reduced = reduce_dtype or (torch.float32 if narrow else None)
    policy = MixedPrecisionPolicy(dtype if narrow else None, reduced, cast_forward_inputs=False)
    shared = shared_of_parameters(module)
    marks = {name: shared[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    units = [module.get_submodule(name) for name in names]
    owing = {_unit_of(head, names) for head in deferred_heads(module)}
    for name, unit in [*zip(names, units, strict=True), ("", module)]:
        if any(True for _ in unit.parameters()) or unit is module:
            # a head that owes its logits to the loss is needed after its forward has ended
            let_go = reshard_after_forward and name not in owing
            fully_shard(unit, mesh=data, mp_policy=policy, reshard_after_forward=let_go)
    held: list[Any] = [unit for unit in [*units, module] if isinstance(unit, FSDPModule)]
    for name in owing:
        unit = module.get_submodule(name)
        heads = [module.get_submodule(head) for head in deferred_heads(module) if _unit_of(head, names) == name]
        unit.register_forward_pre_hook(partial(_gather_anew, heads), prepend=True)  # before that of `fully_shard`
    for unit in held:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if "cp" in spec.names and spec.size("cp") > 1:  # a third axis of ranks with other tokens
            unit.set_all_reduce_hook(partial(dist.all_reduce, group=axis_group(mesh, "cp")))
    for name, rows in marks.items():
        setattr(module.get_parameter(name), SHARED, rows)
    stages = {}
    if cut is not None:
        stages = {id(unit): cut.stages.stage_of(name) for name, unit in zip(names, units, strict=True)}
    return FullyShardedData(module, held, stages, defer)


def _gather_anew(heads: Sequence[nn.Module], unit: Any, args: Any) -> None:
    """Let go of a unit that owes logits, so that its forward gathers it from what the parameters are now.

    It stays gathered after its forward, until a backward lets it go. Where there was none (evaluation, generation), a step of
    an optimiser may have come since. Forwards whose backward is still to come find it gathered again, in the same storage.
    """
    if private.backward_id() != -1:  # a replay: the backward around it has gathered the unit
        return
    unit.reshard()
    for head in heads:
        watch_writes(head)


def _unit_of(name: str, units: Sequence[str]) -> str:
    """The innermost unit that a module lies in; "" is the rest."""
    return max((unit for unit in units if name == unit or name.startswith(unit + ".")), key=len, default="")


def _units(module: nn.Module, patterns: Sequence[str] | None, cut: Cut | None) -> list[str]:
    """The modules that are gathered as one: given, of the plan, or the layers."""
    record = record_of(module)
    plan = record.resolved.plan if record is not None else plan_or_none(module, None)
    names = [name for name, _ in module.named_modules() if name]
    if patterns is None:
        patterns = plan.zero_units if plan is not None else ()
    if patterns:
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                what = f"no module matches the ZeRO unit {pattern!r}"
                raise ModelError(Problem("unmatched-unit", what, fix=did_you_mean(pattern, names)))
        found = [name for name in names if any(matches(pattern, name) for pattern in patterns)]
    else:
        layers = _layers(plan, cut)
        found = [name for name in names if layers is not None and name.rpartition(".")[0] == layers]
    return [name for name in found if cut is None or cut.present(name)]


def _layers(plan: Any, cut: Cut | None) -> str | None:
    if cut is not None:
        return cut.stages.cuts.layers
    if plan is None:
        return None
    source = plan.cuts or plan.region
    return source.layers if source is not None else None
