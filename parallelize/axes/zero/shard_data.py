"""`shard_data`: the data axes of a mesh, by ZeRO stage. After the plan, before an optimizer is built.

What each data rank stores:

| stage | gradients | optimizer state | parameters |
|---|---|---|---|
| 0 | full | full | full |
| 1 | full | its shard | full |
| 2 | its shard | its shard | full |
| 3 | its shard | its shard | its shard (`fully_shard`) |

Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.zero.added_parameters import AddedParameters
from parallelize.axes.zero.data_guards import refuse_steps
from parallelize.axes.zero.data_ranks import DataOptions, DataRanksOf
from parallelize.axes.zero.fsdp import FsdpEngine, apply_fsdp
from parallelize.axes.zero.optimizer_shards import OptimizerShard
from parallelize.axes.zero.reduced_parameters import (
    RefusesCasts,
    cast_parameters,
    master_dtype_of,
    optimizer_shard,
    reduced_parameters,
    stepped_in_shards,
)
from parallelize.axes.zero.reducer import BUCKET_BYTES, BatchNormSync, ReducedParameter, Reducer
from parallelize.axes.zero.replicas import compare_data_ranks
from parallelize.axes.zero.router_loss import share_router_loss
from parallelize.axes.zero.stock_loss import count_over_data_ranks
from parallelize.base.errors import MeshError, ModelError, PlanError, Problem, short_list
from parallelize.base.mesh import DATA_AXES, MeshSpec
from parallelize.base.patches.active import refuse_other_copy
from parallelize.comm.handshake import agree_on
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.choose import plan_or_none
from parallelize.plan.local_rows import check_batch_parts
from parallelize.plan.models.wrapped_models import require_module
from parallelize.plan.pattern import matches
from parallelize.plan.resolve import for_model, zero_units
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.stages import longest_list
from parallelize.state.guards.guard_table import REDUCED, RESOLVED, SHARDED, Guarded, set_up
from parallelize.state.guards.resizing import serve_resizing
from parallelize.state.loop.clip import serve_several_meshes
from parallelize.state.records import applied, facts_of, mark_applied, record_of, resolution_so_far
from parallelize.state.sharding import join_tied_slots
from parallelize.state.step_results import as_instance
from parallelize.state.written_versions import follow_data_assignments

log = logging.getLogger("parallelize")

STAGES = (0, 1, 2, 3)


@dataclass
class DataRecord:
    """What `shard_data` did to a model; stored on its root.

    Attributes:
        zero: the stage. engine: reduces gradients over the data ranks. shards: this rank's part of each parameter, as
            the optimizer steps it (stages 0 to 2, and adapters that were added to stage 3).
        masters: whether the optimizer steps float32 copies, because parameters are narrower.
        compute: the dtype of compute, where parameters are stored in a wider one (stage 3).
        added_parameters: takes in parameters that train only since then; of stage 3 adapters.
    """

    zero: int
    mesh: MeshView
    engine: Reducer | FsdpEngine | None
    shards: list[OptimizerShard] = field(default_factory=list)
    masters: bool = False
    compute: torch.dtype | None = None
    added_parameters: AddedParameters | None = None

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a model has no record: nothing reduces or steps its parameters (see `guard_gradients`)."""


def data_of(module: nn.Module) -> DataRecord | None:
    """What `shard_data` did to this model, or None."""
    return as_instance(applied(module).data, DataRecord)


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
    check_replicated: bool = True,
) -> nn.Module:
    """Keep the data-parallel ranks of a mesh in step, in place, and return the model.

    Gradients are SUMS over the axes dp_replicate, dp (or dp_shard) and cp: divide the loss by the global count of
    tokens, as `Pipeline.step` does, and as is done for the loss that a causal model of `transformers` computes from
    `labels`. State is sharded over dp (or dp_shard) and replicated over dp_replicate and cp.

    Args:
        module: plain, or after `parallelize_module`. Build the optimizer afterwards, with `build_optimizer`.
        mesh: with at least one data axis, unless `zero` is 0.
        zero: the stage, 0 to 3.
        dtype: of parameters and compute, such as bfloat16; the optimizer then steps float32 copies. Default: as they
            are.
        reduce_dtype: of the sums of gradients. Default: float32 where `dtype` is narrower, else the parameters' dtype.
        units: for stage 3, patterns of the modules whose parameters are gathered together. Default: the plan's units,
            else its layers.
        defer: stages 2 and 3 reduce once per step of several backwards instead of in each: fewer messages, but full
            gradients (parameters x reduce_dtype bytes) are stored until then.
        bucket_bytes: gradients of at least this many bytes are reduced together (stages 0 to 2).
        reshard_after_forward: for stage 3, whether units are resharded after forward and gathered again in backward.
        check_replicated: compare the parameters over the data axes, by digest. Those on meta have no values to compare.

    Returns: the same module.
    Raises: MeshError `no-data-axis`; ModelError `bad-zero-stage`, `data-axes-taken`, `other-data-parallel`,
        `early-optimizer`, `mixes-rows`; for stage 3 also ModelError `unmatched-unit`, `scalar-parameter`;
        HandshakeError `replicas-differ`, and `ranks-disagree` where ranks were given other settings. On every rank;
        before anything is changed, but for `scalar-parameter`.
    Cost: handshakes, and with `check_replicated` a read of the parameters and an all-gather of 40 bytes. A step sends,
        with P bytes of gradients and n ranks: stages 0 and 1, one all-reduce of P (and stage 1 an all-gather of the
        parameters after the optimizer's step); stage 2, a reduce-scatter of P per backward, or per step with `defer`,
        and the all-gather; stage 3, an all-gather of the parameters in forward and in backward, a reduce-scatter of P,
        and per backward one all-reduce of a byte per parameter. Data ranks that run different units of stage 3 raise
        HandshakeError `units-diverge`.
    Source: ZeRO, arXiv:1910.02054.
    """
    view = MeshView.of(mesh)
    with agree_on(view) as agreed:
        refuse_other_copy()
        require_module(module)
        _check(module, view.spec, zero)
        set_up(RESOLVED, Guarded(module, view))
        earlier = resolution_so_far(module)
        resolved = replace(
            earlier.with_options(zero=zero, defer=defer, dtype=dtype, reduce_dtype=reduce_dtype),
            mesh=earlier.mesh.with_axes(view.spec.only(*DATA_AXES)),
            zero_units=_units(module, earlier, units) if zero == 3 else (),
        )
        agreed |= resolved.structure() | {"option bucket_bytes": str(bucket_bytes)}
    if check_replicated:
        compare_data_ranks(module, view)
    return apply_data_axes(
        module, view, resolved, DataOptions.of(resolved.options, bucket_bytes, reshard_after_forward)
    )


def _units(module: nn.Module, earlier: ResolvedPlan, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """The units of ZeRO 3 by the caller's patterns, the applied plan, or that of the model's type."""
    plan, facts = earlier.plan, facts_of(module)
    if not plan.rules:
        plan = for_model(plan_or_none(module, None) or plan, facts)
    return zero_units(plan, facts, patterns=patterns, layers=earlier.cut_layers)


def apply_data_axes(module: nn.Module, mesh: MeshView, resolved: ResolvedPlan, options: DataOptions) -> nn.Module:
    """`shard_data` by a resolved plan, for a model that nothing but its modules refers to."""
    _check(module, mesh.spec, resolved.options.zero)
    mark_applied(module)  # from here on it holds what is changed in other libraries
    make_contiguous(module)
    join_tied_slots(module)
    serve_several_meshes()
    follow_data_assignments()
    set_up(REDUCED, Guarded(module, mesh, plan=resolved))
    if resolved.options.zero == 3:
        _shard_parameters(module, mesh, options, resolved)
    else:
        _reduce_gradients(module, mesh, options, resolved)
        serve_resizing(module)
    if mesh.spec.data_axes:
        count_over_data_ranks(module, mesh)
        share_router_loss(module, mesh)
    mark_applied(module, resolved=resolved)
    return module


def _shard_parameters(module: nn.Module, mesh: MeshView, options: DataOptions, resolved: ResolvedPlan) -> None:
    """ZeRO 3."""
    if not resolved.zero_units:
        _warn_of_one_unit(module)
    if options.dtype is not None and not options.low_precision:  # `fully_shard` is only told a dtype of compute
        cast_parameters(module.modules(), options.dtype)
    engine = apply_fsdp(module, mesh, options, resolved)
    set_up(SHARDED, Guarded(module, mesh))
    compute = options.dtype if options.low_precision else None
    shards: list[OptimizerShard] = []
    added_parameters = _manage_later_adapters(module, mesh, options, engine, shards)
    mark_applied(module, data=DataRecord(3, mesh, engine, shards, compute=compute, added_parameters=added_parameters))


def _warn_of_one_unit(module: nn.Module) -> None:
    """Say that the model is one unit, if it has layers that could be gathered one after another."""
    facts = facts_of(module)
    with suppress(PlanError):
        layers = longest_list(facts)
        pattern = f"{layers}.*" if layers else "*"
        if sum(matches(pattern, name) for name in facts.modules) > 1:
            text = (
                "ZeRO 3 gathers all parameters of %s at once: no plan names its layers. shard_data(..., units=[%r]) or "
                "`zero: {units: [%r]}` in a plan gathers them one after another"
            )
            _warn_once(text % (type(module).__name__, pattern, pattern))


@cache
def _warn_once(text: str) -> None:
    """Not again where a model that was predicted is then trained."""
    log.warning(text)


def _manage_later_adapters(
    module: nn.Module, mesh: MeshView, options: DataOptions, engine: FsdpEngine, shards: list[OptimizerShard]
) -> AddedParameters:
    """Adapters that are added to sharded units are small: each rank stores them in full, and optimizer states as of
    ZeRO 1."""

    def current() -> Iterator[tuple[str, Any]]:
        return ((name, p) for name, p in module.named_parameters() if not engine.shards(name, p))

    engine.added = Reducer([], options.reduce_dtype, named_parameters=current, bucket_bytes=options.bucket_bytes)
    casts = RefusesCasts(())
    module.register_forward_pre_hook(casts)
    added_parameters = AddedParameters(module, mesh, 1, options, None, engine.added, shards, casts, engine)
    module.register_forward_pre_hook(added_parameters, prepend=True)  # before parameters are gathered
    return added_parameters


def _reduce_gradients(module: nn.Module, mesh: MeshView, options: DataOptions, resolved: ResolvedPlan) -> None:
    """ZeRO 0 to 2."""
    masters = options.low_precision or _sums_are_wider(module, options.dtype, options.reduce_dtype)
    zero = resolved.options.zero
    ranks_of = DataRanksOf(mesh, zero, record_of(module))
    master_dtype = torch.float32 if masters else None
    reduced = list(reduced_parameters(module, resolved, ranks_of))
    shards = [
        optimizer_shard(parameter, ranks, master_dtype_of(parameter.param, options, master_dtype))
        for parameter, ranks in reduced
    ]
    if options.dtype is not None:
        cast_parameters(module.modules(), options.dtype)
        reduced = list(reduced_parameters(module, resolved, ranks_of))
    parameters = [parameter for parameter, _ in reduced]
    reducer = _reducer(module, mesh, parameters, shards, options, options.reduce_dtype or master_dtype)
    casts = RefusesCasts(shards)
    module.register_forward_pre_hook(casts)
    added_parameters = AddedParameters(module, mesh, zero, options, master_dtype, reducer, shards, casts)
    module.register_forward_pre_hook(added_parameters)
    record = DataRecord(zero, mesh, reducer, shards, masters, added_parameters=added_parameters)
    mark_applied(module, data=record)
    refuse_steps(shard.param for shard in shards if stepped_in_shards(shard, zero))
    for name, owner in module.named_modules():
        if owner._parameters:
            owner.register_load_state_dict_post_hook(partial(_after_load, record, f"{name}." if name else ""))


def _sums_are_wider(module: nn.Module, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> bool:
    """Whether gradients of parameters that keep their dtype are summed in a wider one."""
    if dtype is not None or reduce_dtype is None:
        return False
    floating = (parameter for parameter in module.parameters() if parameter.is_floating_point())
    return any(parameter.dtype.itemsize < reduce_dtype.itemsize for parameter in floating)


def _reducer(
    module: nn.Module,
    mesh: MeshView,
    parameters: Sequence[ReducedParameter],
    shards: list[OptimizerShard],
    options: DataOptions,
    dtype: torch.dtype | None,
) -> Reducer | None:
    """What sums gradients over the data axes, and splits them by the stage; None where there is nothing to do."""
    if not mesh.spec.data_axes and dtype is None:
        return None
    splits = any(parameter.groups.shard is not None for parameter in parameters)
    return Reducer(
        [parameter for parameter in parameters if parameter.param.requires_grad],
        dtype,
        frozen=[parameter for parameter in parameters if not parameter.param.requires_grad],
        named_parameters=module.named_parameters,
        on_reduced=BatchNormSync(module, mesh.data_group).share,
        specs={id(shard.param): shard.spec for shard in shards},
        bucket_bytes=options.bucket_bytes,
        defer=options.defer and splits,
    )


def _after_load(data: DataRecord | None, prefix: str, owner: nn.Module, _: Any) -> None:
    """Weights were loaded: update float32 copies. The parameters must still be the ones that are reduced and
    stepped."""
    if data is None:  # of a copy
        return
    current = {id(parameter) for parameter in owner._parameters.values()}
    shards = [shard for shard in data.shards if shard.name.rpartition(".")[0] == prefix.rstrip(".")]
    replaced = [shard.name for shard in shards if id(shard.param) not in current]
    if replaced:
        what = f"parameters were replaced after shard_data, which still reduces the old ones: {short_list(replaced, 4)}"
        raise ModelError(Problem("parameter-replaced", what, fix="load_state_dict(..., assign=False)"))
    for shard in shards:
        shard.reload()


def _check(module: nn.Module, spec: MeshSpec, zero: int) -> None:
    if zero not in STAGES:
        raise ModelError(Problem("bad-zero-stage", f"there is no ZeRO stage {zero!r}", fix="use 0, 1, 2 or 3"))
    if zero > 0 and not {"dp", "dp_shard"} & set(spec.names):
        fix = 'name one: build_mesh("cuda", dp=4, tp=2); or use zero=0'
        what = f"ZeRO {zero} shards state over dp, and the mesh {spec} has no such axis"
        raise MeshError(Problem("no-data-axis", what, fix=fix))
    if data_of(module) is not None:
        what = "shard_data was applied to this model before"
        raise ModelError(Problem("data-axes-taken", what, fix="apply it once"))
    check_batch_parts(dict(module.named_modules()), spec)


def make_contiguous(module: nn.Module) -> None:
    """Make parameters contiguous, as gradients are: fused optimizers assume that both have the same strides."""

    def dense(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous() if isinstance(tensor, nn.Parameter) else tensor

    for owner in module.modules():
        if any(p is not None and not p.is_contiguous() for p in owner._parameters.values()):
            owner._apply(dense, recurse=False)
