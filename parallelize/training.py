"""`parallelize_model`: a stock model on the whole mesh. The order of its text is the order of the work.

cut into stages -> tensor parallelism -> context parallelism -> recompute -> ZeRO 3 -> values for a meta model -> ZeRO 0 to 2 -> ties -> dropout
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.apply import parallelize_module
from parallelize.checkpoint.weights import load_weights
from parallelize.clip import clip_grad_norm_
from parallelize.context.apply import context_parallel, dropout_refused
from parallelize.errors import MeshError, ModelError, Problem
from parallelize.fuse_loss import fuse_heads
from parallelize.groups import mesh_spec
from parallelize.mesh import AXES, DATA_AXES, MeshSpec, axis_order
from parallelize.pipeline.cut import cut_of, cut_pipeline
from parallelize.pipeline.engine import Pipeline
from parallelize.pipeline.schedules import build_schedule
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model import describe
from parallelize.plan.schema import Cuts, Plan
from parallelize.plan.stages import Assignment, Costs
from parallelize.randomness.initialise import initialize as draw
from parallelize.randomness.install import drops, install_dropout
from parallelize.randomness.sites import refused_modules
from parallelize.recomputation import recompute as recompute_units
from parallelize.ties import check_declared, mark_stages, tie_parameters, ties_of
from parallelize.zero.apply import STAGES, data_of, refuse_early_optimizers, shard_data
from parallelize.zero.optimizer import build_optimizer

T = torch.Tensor


class ParallelModel:
    """A model on a mesh, and what a training loop does with it.

    Attributes:
        module: this rank's part of the model. mesh: as given. pipeline: runs steps, also where `pp` is 1 or absent.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, pipeline: Pipeline):
        self.module, self.mesh, self.pipeline = module, mesh, pipeline

    def step(self, *args: Any, targets: Any = None, **kwargs: Any) -> T:
        """Forward and backward of this data rank's batch; returns the mean loss over all of them. See `Pipeline.step`."""
        return self.pipeline.step(*args, targets=targets, **kwargs)

    def evaluate(self, *args: Any, targets: Any = None, **kwargs: Any) -> T:
        """The mean loss, without gradients."""
        return self.pipeline.evaluate(*args, targets=targets, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Outputs by microbatch, on ranks of the last stage."""
        return self.pipeline.forward(*args, **kwargs)

    def optimizer(self, cls: type[Optimizer], params: Any = None, **options: Any) -> Optimizer:
        """An optimiser of that class, whose state lies where the ZeRO stage says. See `build_optimizer`."""
        return build_optimizer(self.module, cls, params, **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> T:
        """Clip by the norm of the whole model's gradients, over all axes; returns the norm. See `clip_grad_norm_`."""
        return clip_grad_norm_(self.module, max_norm, norm_type, error_if_nonfinite)

    def check_ties(self) -> None:
        """Compare tied copies on different stages by digest. Raises: HandshakeError `ties-differ`."""
        ties = ties_of(self.module)
        if ties is not None:
            ties.check()


def parallelize_model(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Any = None,
    *,
    zero: int = 0,
    schedule: str = "1f1b",
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
    assignment: Assignment | None = None,
    cuts: Cuts | None = None,
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
    fuse_loss: bool | None = None,
    overlap: str | None = None,
    ulysses: int = 1,
    recompute: str = "off",
    recompute_every: int = 1,
    recompute_save: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    defer: bool = False,
    device: torch.device | str | None = None,
    initialize: int | str | os.PathLike | Callable[[nn.Module], Any] | None = None,
    dropout_seed: int = 0,
    loss: Callable[[Any, Any], T] | None = None,
    count: Callable[[Any], T | int] | None = None,
    whole: Collection[str] = (),
    share_inputs: bool = False,
) -> ParallelModel:
    """Put a stock model on a mesh of `pp`, `dp_replicate`, `dp` (or `dp_shard`), `cp` and `tp`; axes may be absent.

    Args:
        module: with weights (the same on every rank), or on meta.
        mesh: its axes choose what is applied. Without `tp` parameters stay plain.
        plan: as for `parallelize_module`; None: by the model.
        zero: the stage of ZeRO over dp: see `shard_data`.
        schedule, num_microbatches, stages_per_rank: of the pipeline; without `pp` a step runs its microbatches in turn.
            num_microbatches defaults to twice the pp size.
        costs, assignment, cuts: where the pipeline is cut: see `cut_pipeline`.
        sequence_parallel, loss_parallel, fuse_loss, overlap: see `parallelize_module`. fuse_loss needs no `tp`.
        ulysses: ranks of `cp` that trade heads, where the rest forms a ring: see `context_parallel`.
        recompute, recompute_every, recompute_save: "full", "selective" or "off": see `recompute`.
        dtype: of compute (bfloat16): the optimiser then keeps float32 copies, and gradients are summed in float32.
        initialize: for a model on meta: a seed; a folder of weights, ours or in Hugging Face's layout; or a function that
            fills the allocated model.
        dropout_seed: masks are a function of it, the step and the place in the global batch, whatever the mesh.
        loss, count: see `Pipeline`.

    Returns: the model with its step, optimiser and clipping.
    Raises: MeshError, PlanError, ModelError before anything is changed, where it can be known by then.
    """
    spec = mesh_spec(mesh)
    _check(module, spec, zero, schedule, num_microbatches, stages_per_rank, initialize)
    pipelined = "pp" in spec.names and spec.size("pp") > 1
    chosen = plan_or_none(module, plan)
    check_declared(describe(module), chosen)
    if pipelined:
        places: dict[str, Any] = {"schedule": schedule, "stages_per_rank": stages_per_rank}
        cut_pipeline(module, mesh, plan, costs=costs, assignment=assignment, cuts=cuts, **places)
    if "tp" in spec.names:
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        options |= {"fuse_loss": fuse_loss, "overlap": overlap, "ulysses": ulysses}
        parallelize_module(module, mesh, plan, **options)
    else:
        if fuse_loss or (fuse_loss is None and chosen is not None and chosen.fuse_loss):
            fuse_heads(module, chosen)
        context_parallel(module, mesh, plan, ulysses=ulysses)
    if recompute != "off":
        recompute_units(module, recompute, every=recompute_every, save=recompute_save, plan=chosen)
    _share_out(module, mesh, spec, zero, dtype, reduce_dtype, defer, lambda: _fill(module, mesh, device, initialize))
    _tie(module, chosen)
    mark_stages(module)
    clock = install_dropout(module, dropout_seed, mesh) if drops(module) else None
    data = data_of(module)
    pipeline = Pipeline(
        module,
        mesh,
        schedule=schedule,
        stages_per_rank=stages_per_rank if pipelined else None,
        num_microbatches=num_microbatches or (2 * spec.size("pp") if pipelined else 1),
        loss=loss,
        count=count,
        whole=whole,
        share_inputs=share_inputs,
        data=data.engine if data is not None else None,
        clock=clock,
    )
    return ParallelModel(module, mesh, pipeline)


def _share_out(
    module: nn.Module,
    mesh: DeviceMesh,
    spec: MeshSpec,
    zero: int,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    defer: bool,
    fill: Callable[[], None],
) -> None:
    """ZeRO, and values for a model on meta: stage 3 cuts before anything is allocated, the others copy what is there."""
    has_data = bool(set(DATA_AXES) & set(spec.names))
    options: dict[str, Any] = {"dtype": dtype, "reduce_dtype": reduce_dtype, "defer": defer}
    if zero == 3:
        shard_data(module, mesh, 3, **options)
    if any(parameter.is_meta for parameter in module.parameters()):
        fill()
    if zero < 3 and (has_data or dtype is not None):
        shard_data(module, mesh, zero, **options)


def _tie(module: nn.Module, plan: Plan | None) -> None:
    ties, data = tie_parameters(module, plan), data_of(module)
    if ties is not None and data is not None:
        for shard in data.shards:  # float32 copies follow what copies on other stages were given
            shard.reload()


def _check(
    module: nn.Module,
    spec: MeshSpec,
    zero: int,
    schedule: str,
    num_microbatches: int | None,
    stages_per_rank: int | None,
    initialize: Any,
) -> None:
    """Mistakes that need no rank but this one."""
    problems = []
    for axis in spec.names:
        if axis not in AXES or axis == "ep":
            fix = "name axes pp, dp_replicate, dp (or dp_shard), cp and tp"
            problems.append(Problem("unknown-axis", f"parallelize_model knows no axis {axis!r}", fix=fix))
    problems += axis_order(spec, zero)
    if {"dp", "dp_shard"} <= set(spec.names):
        problems.append(Problem("unknown-axis", "dp and dp_shard are two names of one axis", fix="use one of them"))
    if zero in STAGES and zero > 0 and not {"dp", "dp_shard"} & set(spec.names):
        what = f"ZeRO {zero} divides state over dp, and the mesh {spec} has no such axis"
        problems.append(Problem("no-data-axis", what, fix='build_mesh("cuda", dp=4, ...), or zero=0'))
    if problems:
        raise MeshError(*problems)
    if "pp" in spec.names and spec.size("pp") > 1:
        build_schedule(schedule, spec.size("pp"), num_microbatches or 2 * spec.size("pp"), stages_per_rank)
    if zero not in STAGES:
        raise ModelError(Problem("bad-zero-stage", f"there is no ZeRO stage {zero!r}", fix="0, 1, 2 or 3"))
    if initialize is None and any(parameter.is_meta for parameter in module.parameters()):
        fix = "initialize=0 (a seed), a folder of weights, or a function that fills the model"
        raise ModelError(Problem("meta-without-values", "the model lies on meta, so it has no values", fix=fix))
    if cut_of(module) is not None or data_of(module) is not None:
        what = "a part of this work has been done on the model already"
        raise ModelError(Problem("wrong-order", what, fix="call parallelize_model alone, or each part by itself"))
    if drops(module) and "cp" in spec.names and spec.size("cp") > 1:
        raise dropout_refused()
    if drops(module):
        refused = refused_modules(module)
        if refused:
            raise ModelError(*refused)
    refuse_early_optimizers(module)


def _fill(module: nn.Module, mesh: DeviceMesh, device: Any, initialize: Any) -> None:
    """Memory and values for a model that lay on meta."""
    where = device if device is not None else mesh.device_type
    if isinstance(initialize, (str, os.PathLike)):
        load_weights(module, initialize, mesh=mesh, device=where)
    elif callable(initialize):
        module.to_empty(device=where)
        initialize(module)
    else:
        draw(module, initialize, device=where)
