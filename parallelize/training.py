"""`parallelize_model`: a stock model on the whole mesh. The order of its text is the order of the work.

Pipeline cut, tensor parallelism, context parallelism, recompute, ZeRO 3, values for a meta model, ZeRO 0 to 2, ties, dropout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.applied.records import cut_of
from parallelize.apply import parallelize_module
from parallelize.checkpoint.weights import load_weights
from parallelize.comm.groups import mesh_spec
from parallelize.context.apply import context_parallel, dropout_refused
from parallelize.errors import MeshError, ModelError, Problem
from parallelize.mesh import AXES, DATA_AXES, MeshSpec, axis_order
from parallelize.pipeline.cut import cut_pipeline
from parallelize.pipeline.engine import Pipeline
from parallelize.pipeline.parallel_model import ParallelModel
from parallelize.pipeline.schedules import build_schedule
from parallelize.pipeline.ties import check_declared, mark_stages, tie_parameters
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model_facts import describe
from parallelize.plan.schema import Cuts, Plan
from parallelize.plan.stages import Assignment, Costs
from parallelize.randomness.dropout.call_sites import refused_modules
from parallelize.randomness.dropout.install import drops, install_dropout
from parallelize.randomness.init.initialize import initialize as draw
from parallelize.recomputation.api import recompute as recompute_units
from parallelize.vocabulary.loss.fuse_loss import fuse_heads
from parallelize.zero.apply import STAGES, apply_data_axes, data_of
from parallelize.zero.early_optimizers import refuse_early_optimizers
from parallelize.zero.options import DataOptions

T = torch.Tensor


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
    """Put a stock model on a mesh of `pp`, `dp_replicate`, `dp` (or `dp_shard`), `cp` and `tp`, in place; axes may be absent.

    Args:
        module: with weights (the same on every rank), or on meta.
        mesh: its axes choose what is applied. Without `tp`, parameters stay plain.
        plan: as for `parallelize_module`; None: by the model.
        zero: the ZeRO stage over dp, 0 to 3: see `shard_data`.
        schedule, stages_per_rank: of the pipeline: see `build_schedule`.
        num_microbatches: of a step. Default: twice the pp size; 1 without `pp`. Without `pp`, they run sequentially.
        costs, assignment, cuts: where the pipeline is cut: see `cut_pipeline`.
        sequence_parallel, loss_parallel, overlap: see `parallelize_module`.
        fuse_loss: the head returns `DeferredLogits`, and the loss computes logits in chunks of tokens. Needs no `tp`.
        ulysses: ranks of `cp` that trade heads, where the rest forms a ring: see `context_parallel`.
        recompute, recompute_every, recompute_save: "full", "selective" or "off": see `recompute`.
        dtype: of compute (bfloat16): the optimizer then keeps float32 copies, and gradients are summed in float32.
        reduce_dtype, defer: how gradients are reduced over the data axes: see `shard_data`.
        device: where a model on meta is allocated. Default: the mesh's device type.
        initialize: for a model on meta: a seed; a folder of weights, ours or in Hugging Face's layout; or a function that
            fills the allocated model.
        dropout_seed: masks are a function of it, the step and the position in the global batch, whatever the mesh.
        loss, count, whole, share_inputs: of a step: see `Pipeline`.

    Returns: the model with its step, optimizer and clipping.
    Raises: MeshError `unknown-axis`, `no-data-axis`; ModelError `bad-zero-stage`, `meta-without-values`, `wrong-order`,
        `early-optimizer`; PlanError, and what the called functions raise. Before anything is changed, where it can be known
        by then; the same on every rank.
    Cost: of the call itself: one exchange of digests, the broadcast of `parallelize_module`, and of tied copies. Of a step:
        see `explain`.
    """
    spec = mesh_spec(mesh)
    is_pipelined = "pp" in spec.names and spec.size("pp") > 1
    cutting: dict[str, Any] = {"schedule": schedule, "stages_per_rank": stages_per_rank}
    cutting |= {"costs": costs, "assignment": assignment, "cuts": cuts}
    tensor: dict[str, Any] = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    tensor |= {"fuse_loss": fuse_loss, "overlap": overlap}
    data_options = DataOptions(dtype, reduce_dtype, defer=defer)
    stepping: dict[str, Any] = {"schedule": schedule, "loss": loss, "count": count}
    stepping |= {"whole": whole, "share_inputs": share_inputs}

    _check(module, spec, zero, schedule, num_microbatches, stages_per_rank, initialize)
    chosen = plan_or_none(module, plan)
    check_declared(describe(module), chosen)

    if is_pipelined:
        cut_pipeline(module, mesh, plan, **cutting)
    if "tp" in spec.names:
        parallelize_module(module, mesh, plan, ulysses=ulysses, **tensor)
    else:
        if fuse_loss or (fuse_loss is None and chosen is not None and chosen.fuse_loss):
            fuse_heads(module, chosen)
        context_parallel(module, mesh, plan, ulysses=ulysses)
    if recompute != "off":
        recompute_units(module, recompute, every=recompute_every, save=recompute_save, plan=chosen)
    if zero == 3:  # shards before anything is allocated
        apply_data_axes(module, mesh, zero, data_options)
    if any(parameter.is_meta for parameter in module.parameters()):
        _fill(module, mesh, device, initialize)
    if zero < 3 and (dtype is not None or set(DATA_AXES) & set(spec.names)):
        apply_data_axes(module, mesh, zero, data_options)
    _tie(module, chosen)
    mark_stages(module)
    clock = install_dropout(module, dropout_seed, mesh) if drops(module) else None

    data = data_of(module)
    pipeline = Pipeline(
        module,
        mesh,
        stages_per_rank=stages_per_rank if is_pipelined else None,
        num_microbatches=num_microbatches or (2 * spec.size("pp") if is_pipelined else 1),
        data=data.engine if data is not None else None,
        clock=clock,
        **stepping,
    )
    return ParallelModel(module, mesh, pipeline)


def _tie(module: nn.Module, plan: Plan | None) -> None:
    ties, data = tie_parameters(module, plan), data_of(module)
    if ties is not None and data is not None:
        for shard in data.shards:  # float32 copies follow the values of the tied copies
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
