"""`parallelize_model`: a stock model on the whole mesh. The order of its text is the order of the work.

Pipeline cut, tensor parallelism, context parallelism, recompute, ZeRO 3, values for a meta model, ZeRO 0 to 2, ties,
dropout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.context.context_parallel import apply_context
from parallelize.axes.pipeline.cut import check_uncut, cut_to_stages, with_cuts
from parallelize.axes.pipeline.engine import Pipeline
from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.axes.pipeline.schedules import build_schedule
from parallelize.axes.pipeline.ties import mark_stages, tie_parameters
from parallelize.axes.recomputation.recompute import apply_recompute
from parallelize.axes.tensor.torch_styles.dicts import is_styles
from parallelize.axes.tensor.torch_styles.lowering import plan_of_styles
from parallelize.axes.vocabulary.loss.losses import fuse_heads
from parallelize.axes.zero.data_ranks import DataOptions
from parallelize.axes.zero.replicas import compare_data_ranks
from parallelize.axes.zero.shard_data import apply_data_axes, data_of
from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.base.mesh import DATA_AXES, MeshSpec
from parallelize.base.patches.active import refuse_other_copy
from parallelize.checkpoint.weights import load_weights
from parallelize.comm.handshake import agree_on
from parallelize.comm.mesh_view import MeshView
from parallelize.comm.meshes import require_names
from parallelize.ops.attention.flex_attention import serve_flex
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model_facts import describe
from parallelize.plan.models.wrapped_models import require_module
from parallelize.plan.options import Options, options_of
from parallelize.plan.parameter_shards import shards_of
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.schema import Cuts, Plan
from parallelize.plan.stages import Assignment, Costs
from parallelize.state.guards.guard_table import FINISHED, GIVEN, RESOLVED, Guarded, set_up
from parallelize.state.randomness.dropout.call_sites import refused_modules
from parallelize.state.randomness.dropout.install import drops, install_draws, install_dropout, unknown_layouts
from parallelize.state.randomness.init.initialize import initialize as draw
from parallelize.state.records import mark_applied, pipeline_cut
from parallelize.state.sharding import Storage
from parallelize.training.apply_plan import apply_plan, check_by_trace
from parallelize.watchdog.watching import name_in_watch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from parallelize.plan.option_keywords import OptionKeywords

T = torch.Tensor


def parallelize_model(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Any = None,
    options: Options | None = None,
    *,
    costs: Costs | None = None,
    assignment: Assignment | None = None,
    cuts: Cuts | None = None,
    device: torch.device | str | None = None,
    initialize: int | str | os.PathLike | Callable[[nn.Module], Any] | None = None,
    dropout_seed: int = 0,
    loss: Callable[[Any, Any], T] | None = None,
    count: Callable[[Any], T | int] | None = None,
    whole: Collection[str] | Mapping[str, bool] = (),
    share_inputs: bool = False,
    check_replicated: bool = True,
    trace: bool | None = None,
    **keywords: Unpack[OptionKeywords],
) -> ParallelModel:
    """Put a stock model on a mesh of `pp`, `dp_replicate`, `dp` (or `dp_shard`), `cp` and `tp`, in place; axes may be
    absent.

    Args:
        module: with weights (the same on every rank), or on meta.
        mesh: its axes choose what is applied. Without `tp`, parameters stay plain.
        plan: as for `parallelize_module`; None: by the model.
        options, keywords: the fields of `Options`, as one object or as keywords, which win: `zero=2, schedule="zbv",
            num_microbatches=8, recompute="full", dtype=torch.bfloat16`. What neither gives is what the plan's
            `defaults:` say.
        costs, assignment, cuts: where the pipeline is cut: see `cut_pipeline`.
        device: where a model on meta is allocated. Default: the mesh's device type.
        initialize: for a model on meta: a seed; a folder of weights, ours or in Hugging Face's layout; or a function
            that fills the allocated model.
        dropout_seed: masks, and what else a forward draws, are a function of it, the step and the position in the
            global batch, whatever the mesh.
        loss, count, whole, share_inputs: of a step: see `Pipeline`.
        check_replicated: compare what ranks must have alike, by digest: the parameters of data ranks now, in each step
            inputs, targets, mode and hyperparameters, and in every `compare_every`-th step the parameters that ranks
            store alike. False turns all of it off.
        trace: as for `parallelize_module`.

    Returns: the model with its step, optimizer and clipping.
    Raises: MeshError `unknown-axis`, `unnamed-mesh`, `no-data-axis`; ModelError `not-a-module`, `unknown-option`,
        `bad-option`, `bad-zero-stage`, `meta-without-values`, `wrong-order`, `other-data-parallel`, `early-optimizer`;
        HandshakeError `replicas-differ`; PlanError, and what the called functions raise. Before anything is changed,
        where it can be known by then; the same on every rank.
    Cost: of the call itself: an exchange of digests for each of the steps that decide something, with
        `check_replicated` a read of the parameters, the broadcast of `parallelize_module`, and of tied copies. Of a
        step: see `explain`.
    """
    view, requested = MeshView.of(mesh), options_of(options, keywords)
    spec = view.spec
    with agree_on(view) as agreed:
        refuse_other_copy()
        require_module(module)
        require_names(mesh)
        chosen = with_cuts(_plan(module, spec, plan), cuts)
        complete = requested.complete(chosen.options if chosen is not None else None)
        if complete.expert_ranks > 1 and "tp" not in spec.names:  # experts have rules of the plan, which are over tp
            spec = MeshSpec([*spec.axes, ("tp", 1)])
        _check(module, spec, complete, initialize)
        set_up(GIVEN, Guarded(module))
        set_up(RESOLVED, Guarded(module, view))
        resolved = resolve(chosen, describe(module), spec, complete, costs=costs, assignment=assignment)
        agreed |= resolved.structure()
        check_by_trace(module, resolved, trace)  # before stages are cut
        if drops(module) and (unplaceable := unknown_layouts(resolved)):
            raise ModelError(*unplaceable)

    view = view.with_tp() if "tp" in spec.names else view
    if check_replicated:
        _compare_data_ranks(module, view, resolved)
    if spec.ranks("pp") > 1:
        cut_to_stages(module, view, resolved)
    storage = Storage(
        check_replicated=None if check_replicated else False, compare_every=resolved.options.compare_every
    )
    _apply_tensor_axes(module, view, resolved, storage)
    if complete.recompute != "off":
        apply_recompute(module, lambda: resolved)
    _apply_data_axes(module, view, resolved, _Values(device, initialize, check_replicated))
    _tie(module)
    mark_stages(module)
    clock = (install_dropout if drops(module) else install_draws)(module, mesh=view, seed=dropout_seed)

    set_up(FINISHED, Guarded(module, view))
    pipeline = Pipeline(
        module,
        view,
        schedule=complete.schedule,
        stages_per_rank=complete.stages_per_rank if spec.ranks("pp") > 1 else None,
        num_microbatches=complete.microbatches(spec),
        loss=loss,
        count=count,
        whole=whole,
        share_inputs=share_inputs,
        clock=clock,
        check_replicated=check_replicated,
        compare_every=complete.compare_every,
        overlap_microbatches=complete.microbatch_overlap(spec),
    )
    name_in_watch(module)
    return ParallelModel(module, view.device_mesh, pipeline)


def _plan(module: nn.Module, spec: MeshSpec, plan: Any) -> Plan | None:
    """The plan; on a mesh without `tp` and `cp` there may be none."""
    needed = "tp" in spec.names or spec.ranks("cp") > 1 or is_styles(plan)
    if needed:
        return plan_of_styles(module, plan, tp=spec.ranks("tp"))
    explicit_plan = None if plan == "auto" else plan  # nothing is to be derived where nothing is sharded over `tp`
    return plan_or_none(module, explicit_plan) or plan_or_none(module, None)


def _compare_data_ranks(module: nn.Module, mesh: MeshView, resolved: ResolvedPlan) -> None:
    """Compare this rank's stages over the data axes: of the first rank of `tp` alone, whose values the others get."""
    tp_rank, pp_rank = mesh.index("tp"), mesh.index("pp")
    names = [shard.name for shard in shards_of(resolved, pp_rank, tp_rank)]
    compare_data_ranks(module, mesh, names, compares=tp_rank == 0)


def _apply_tensor_axes(module: nn.Module, mesh: MeshView, resolved: ResolvedPlan, storage: Storage) -> None:
    """The axes `tp` and `cp`."""
    if "tp" in resolved.mesh.names:
        apply_plan(module, mesh, lambda: resolved, storage)
        return
    mark_applied(module)  # from here on it holds what is changed in other libraries
    serve_flex()
    if resolved.options.fuse_loss:
        fuse_heads(module, resolved)
    apply_context(module, mesh, lambda: resolved)


class _Values(NamedTuple):
    """Where the values of a model on meta come from; see `parallelize_model`."""

    device: Any
    initialize: Any
    check_replicated: bool


def _apply_data_axes(module: nn.Module, mesh: MeshView, resolved: ResolvedPlan, values: _Values) -> None:
    """The data axes, and values for a model on meta: of ZeRO 3 it is sharded before anything is allocated."""
    options = resolved.options
    data_options = DataOptions.of(options)
    if options.zero == 3:
        apply_data_axes(module, mesh, resolved, data_options)
    if any(parameter.is_meta for parameter in module.parameters()):
        _fill(module, mesh, values.device, values.initialize)
        if values.check_replicated:
            sharded = (resolved.mesh.shard_axis,) if options.zero == 3 else ()
            compare_data_ranks(module, mesh, axes=[axis for axis in DATA_AXES if axis not in sharded])
    if options.zero < 3 and (options.dtype is not None or set(DATA_AXES) & set(resolved.mesh.names)):
        apply_data_axes(module, mesh, resolved, data_options)


def _tie(module: nn.Module) -> None:
    ties = tie_parameters(module)
    if ties is not None:
        ties.reload_masters()


def _check(module: nn.Module, spec: MeshSpec, options: Options, initialize: Any) -> None:
    """Mistakes that need no rank but this one."""
    if problems := options.check_on(spec):
        raise MeshError(*problems)
    if spec.ranks("pp") > 1:
        build_schedule(options.schedule, spec.ranks("pp"), options.microbatches(spec), options.stages_per_rank)
    if initialize is None and any(parameter.is_meta for parameter in module.parameters()):
        fix = "initialize=0 (a seed), a folder of weights, or a function that fills the model"
        raise ModelError(Problem("meta-without-values", "the model is on meta, so it has no values", fix=fix))
    if pipeline_cut(module) is not None or data_of(module) is not None:
        what = "a part of this work has been done on the model already"
        raise ModelError(Problem("wrong-order", what, fix="call parallelize_model alone, or each part by itself"))
    if spec.ranks("pp") > 1:
        check_uncut(module)
    if (drops(module) or spec.ranks("tp", "cp") > 1) and (refused := refused_modules(module)):
        raise ModelError(*refused)


def _fill(module: nn.Module, mesh: MeshView, device: Any, initialize: Any) -> None:
    """Memory and values for a model that was on meta."""
    where = device if device is not None else mesh.device_type
    if isinstance(initialize, (str, os.PathLike)):
        load_weights(module, initialize, mesh=mesh.device_mesh, device=where)
    elif callable(initialize):
        module.to_empty(device=where)
        initialize(module)
    else:
        draw(module, initialize, device=where)
