"""`parallelize_module`: a plan applied to a model. The one place that changes a model.

The order is the order of the text: resolve the plan, compare it over ranks, and only then shard and install. A failure
after that point restores the module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.adapters.prompts import unserved_prefixes
from parallelize.axes.context.context_parallel import apply_context, check_context, on_context
from parallelize.axes.tensor.install.installer import Installer
from parallelize.axes.tensor.install.module_checks import problems_of_modules
from parallelize.axes.tensor.overlap_sites import PlannedCallSite, asks_for_symmetric_memory, check_call_sites
from parallelize.axes.tensor.torch_styles.dicts import apply_styles, keys_replaced
from parallelize.axes.tensor.torch_styles.lowering import passes_dtensors, plan_of_styles
from parallelize.axes.tensor.torch_styles.shard_misuse import misused_shards
from parallelize.axes.tensor.torch_styles.styles import CONVERTING
from parallelize.axes.vocabulary.generation.transformers_generate import install_generation
from parallelize.axes.zero.replicas import compare_weights
from parallelize.axes.zero.router_loss import share_router_loss
from parallelize.base.errors import MeshError, ModelError, PlanError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.patches.active import refuse_other_copy
from parallelize.base.providers import provider
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.comm.handshake import TIMEOUT_S, InputCheck, agree_on
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.attention.flex_attention import serve_flex
from parallelize.ops.matmul import symmetric_memory
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.wrapped_models import require_module
from parallelize.plan.options import Options, wrong_folding
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.schema import Plan
from parallelize.state.compiled_graphs import serve_compilers
from parallelize.state.guards.guard_table import (
    GIVEN,
    LEFT_UNREDUCED,
    PLANNED,
    RESOLVED,
    STEPPED,
    STYLED,
    Guarded,
    set_up,
)
from parallelize.state.guards.resizing import serve_resizing
from parallelize.state.loop.clip import serve_several_meshes
from parallelize.state.meta_buffers import guard_buffers, guard_moves
from parallelize.state.pending_reductions import PendingReductions
from parallelize.state.randomness.dropout.install import install_draws, require_installed_dropout
from parallelize.state.records import (
    PlanRecord,
    axis_of_layout,
    facts_of,
    mark_applied,
    part_of,
    pipeline_cut,
    record_of,
    resolution_of,
)
from parallelize.state.sharding import Sharder, Storage
from parallelize.state.state_dict import install_state_hooks
from parallelize.state.transaction import Transaction, gc_paused
from parallelize.state.written_versions import count_optimizer_writes, follow_data_assignments
from parallelize.watchdog.watching import name_in_watch

PlanLike = Plan | str | os.PathLike | Mapping[str, Any] | Any


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: PlanLike | None = None,
    *,
    src_data_rank: int | None = 0,
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
    fuse_loss: bool | None = None,
    overlap: str | None = None,
    ulysses: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    weights_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    check_replicated: bool | None = None,
    own_reduction: bool = False,
    trace: bool | None = None,
    handshake_timeout_s: float = TIMEOUT_S,
) -> nn.Module:
    """Apply tensor, sequence and loss parallelism to a stock module, in place, and return it.

    Args:
        module: with weights, or on the meta device (materialize it afterwards with `to_empty`).
        device_mesh: its axis named `tp` is used; a 1-D mesh without names is `tp`. None: the surrounding `with mesh:`.
        parallelize_plan: a shipped plan's name, a path to a YAML file, a `Plan`, one style, a dict of name patterns to
            styles as PyTorch's own function takes it, or None to choose by the model.
        src_data_rank: the rank of the `tp` group whose weights count; None: each rank slices its own.
        sequence_parallel, loss_parallel: override the plan's defaults.
        fuse_loss: overrides the plan's default: the head returns `DeferredLogits`, whose loss computes logits in chunks
            of tokens.
        overlap: "auto", "off", "chunked" or "symm_mem"; overrides the plan's default. Collectives overlap with matmuls.
            "auto" measures link and matmuls once, at the first forward, and overlaps where that is faster; see
            `overlap_report`.
        ulysses: where the mesh has an axis `cp`: see `context_parallel`, which is then applied too. Overrides the
            plan's default.
        ep: ranks over which whole experts of a mixture are divided, folded over the mesh's dp, cp and tp: a multiple or
            a divisor of tp. 1: each expert is split over `tp`.
        etp: ranks over which each of these experts is split; ep x etp ranks have all experts together.
        weights_dtype, device: of the stored parameters. Default: as they are.
        check_replicated: compare over `tp`, by digest. True: now, the parameters that all ranks store in full, and the
            inputs at each forward. None: those of these parameters that are not broadcast: all, if src_data_rank is
            None, else those that no style names, which stay as each rank has them; and the inputs at the first forward
            in training, at the first in evaluation, and at every hundredth of each. False: nothing.
        own_reduction: the caller sums gradients over the mesh's data axes, in its own code; those of experts that `ep`
            folds over them over `dp_replicate` and `edp` of their own mesh (`parameter.device_mesh`) alone. Without it,
            `shard_data` or `fully_shard` must be applied before the first backward, which is refused otherwise.
        trace: follow the dims of the plan through a forward of the stock model, on a copy without values: an operation
            that needs all of what a rank has a part of is then named before anything is changed. None: once for each
            class, config and plan of the process, where the inputs are known and it takes seconds at most. True: or
            ModelError `untraceable-model`. False: not.
        handshake_timeout_s: how long ranks wait for each other before the missing ones are named.

    Returns: the same module; its parameters are DTensors, its activations plain local tensors.
    Raises: a backward, ModelError `unreduced-gradients`. This call, PlanError, ModelError (such as `early-optimizer`),
        MeshError, ShapeError before anything is changed; HandshakeError where ranks differ. On every rank.
    Cost: one exchange of digests, and, unless src_data_rank is None, a broadcast over `tp` of every parameter's bytes,
        in messages of up to 64 MB of one dtype; a larger parameter is one of its own.
    """
    mesh = device_mesh if device_mesh is not None else private.current_mesh()
    if not isinstance(mesh, DeviceMesh):
        what = "no device_mesh was given" if mesh is None else f"device_mesh is a {type(mesh).__name__}"
        fix = 'parallelize_module(model, build_mesh("cuda", tp=8), plan), after init_process_group'
        raise MeshError(Problem("no-mesh", what, fix=fix))
    view = MeshView(mesh)
    switches: dict[str, Any] = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    switches |= {"fuse_loss": fuse_loss, "overlap": overlap, "ulysses": ulysses, "ep": ep, "etp": etp}

    def decide() -> ResolvedPlan:
        spec = view.spec
        axes = MeshSpec([*spec.only("cp").axes, ("tp", view.tp.size())])
        plan = plan_of_styles(module, parallelize_plan, strict=False, tp=axes.ranks("tp"))
        resolved = resolve(plan, facts_of(module), axes, Options(**switches), earlier=resolution_of(module))
        if wrong := list(wrong_folding(resolved.options, spec if "tp" in spec.names else axes)):
            raise MeshError(*wrong)
        return resolved

    storage = Storage(src_data_rank, weights_dtype, device, check_replicated)
    apply_plan(module, view, decide, storage, handshake_timeout_s, trace=trace)
    if not own_reduction:
        set_up(LEFT_UNREDUCED, Guarded(module, view))
    record = record_of(module)
    if (record is not None and record.group.size > 1) or on_context(view.spec):
        require_installed_dropout(module)
        install_draws(module, view)
    name_in_watch(module)
    return module


def apply_plan(
    module: nn.Module,
    mesh: MeshView,
    decide: Callable[[], ResolvedPlan],
    storage: Storage | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    trace: bool | None = False,
) -> nn.Module:
    """`parallelize_module` by a resolved plan. decide: returns it; what it raises is raised on every rank."""
    storage = storage or Storage()
    agreed = _agree_on_plan(module, mesh, decide, storage, timeout_s, trace)
    tp = Group(mesh.tp.get_group())
    if tp.size > 1 and asks_for_symmetric_memory(agreed.resolved):
        with agree_on(mesh, timeout_s):  # all ranks come here, and those of a stage with call sites map memory
            if agreed.overlapped:
                symmetric_memory.require(tp, torch.device(mesh.device_type))
    if storage.check_replicated is not False and tp.size > 1:
        names = _full_on_each_rank(module, agreed.plan, storage.compares)
        compare_weights(module, mesh, tp, "tp", names, buffers=record_of(module) is None)  # an earlier plan may shard
    with gc_paused(), Transaction(module):
        mark_applied(module)  # from here on it holds what is changed in other libraries
        serve_flex()
        if _has_rules(agreed.resolved):
            _apply(module, mesh, agreed, storage)
        if agreed.resolved.plan.unlowered_styles:
            _apply_unlowered(module, mesh, agreed, storage)
        apply_context(module, mesh, lambda: agreed.resolved)
    set_up(STEPPED, Guarded(module, mesh))
    serve_several_meshes()
    return module


@dataclass(frozen=True)
class _Agreed:
    """What all ranks have agreed on, before anything is changed.

    Attributes:
        resolved: the plan of the full model. model, plan: the facts and the plan of this rank's part of it.
        overlapped: call sites whose collective overlaps with its matmul.
    """

    resolved: ResolvedPlan
    model: ModelFacts
    plan: ResolvedPlan
    overlapped: tuple[PlannedCallSite, ...]


def _agree_on_plan(
    module: nn.Module,
    mesh: MeshView,
    decide: Callable[[], ResolvedPlan],
    storage: Storage,
    timeout_s: float,
    trace: bool | None,
) -> _Agreed:
    """Resolve and check the plan, and compare what it depends on over ranks; or raise the same error on every rank."""
    tp = mesh.tp
    with agree_on(mesh, timeout_s) as facts, gc_paused():
        facts |= storage.facts()
        refuse_other_copy()
        require_module(module)
        set_up(GIVEN, Guarded(module))
        resolved = decide()
        facts |= resolved.structure()
        if _has_rules(resolved):
            _refuse_twice(module)
        _refuse_overlap_of_dtensors(resolved)
        _refuse_styles_of_codes(resolved)
        if on_context(mesh.spec):
            check_context(resolved)
            _refuse_ulysses_twice(resolved)
        local_model = part_of(module, resolved.facts)
        local_plan = resolved.restricted(local_model)
        _check_modules(local_plan, local_model, [*unserved_prefixes(resolved, resolved.facts)])
        replaced = set(_replaced(module, local_plan))
        set_up(RESOLVED, Guarded(module, plan=local_plan, facts=local_model, replaced=replaced))
        check_by_trace(module, resolved, trace)
        overlapped = check_call_sites(local_plan, local_model, Group(tp.get_group()), torch.device(mesh.device_type))
    return _Agreed(resolved, local_model, local_plan, overlapped)


def check_by_trace(module: nn.Module, resolved: ResolvedPlan, trace: bool | None) -> None:
    """`tools/analysis/automatic_trace.py`, which is loaded where something is traced. Raises: as it does."""
    if trace is not False and resolved.tp_size > 1:
        provider("trace").check_by_trace(module, resolved, trace)


def _refuse_styles_of_codes(resolved: ResolvedPlan) -> None:
    """Raises: ModelError `quantized-style` for a style object that splits a weight by itself, where it may split a
    block."""
    for item in resolved.plan.unlowered_styles:
        facts = resolved.facts.modules.get(item.fqn)
        if facts is not None and facts.packs and not isinstance(item.style, CONVERTING):
            what = (
                f"{type(item.style).__name__} splits {item.fqn}, whose weight is quantized by block, without knowing "
                "its blocks"
            )
            fix = (
                "a plan with `colwise` and `rowwise`; or style objects with local tensors for every module of the dict"
            )
            raise ModelError(Problem("quantized-style", what, fix=fix))


def _replaced(module: nn.Module, plan: ResolvedPlan) -> Iterator[str]:
    """The names of the parameters that become DTensors, which other objects must not refer to."""
    yield from (name for row in plan.parameters.values() if not row.plain for name in row.fact.names)
    cut = pipeline_cut(module)
    for item in plan.plan.unlowered_styles:
        if cut is None or cut.present(item.fqn):
            prefix = f"{item.fqn}." if item.fqn else ""
            yield from (prefix + key for key in keys_replaced(module.get_submodule(item.fqn), item.style))


def _full_on_each_rank(module: nn.Module, plan: ResolvedPlan, with_replaced: bool) -> list[str]:
    """The names of the parameters that every rank of `tp` stores in full: those that no style names, which stay as they
    are.

    with_replaced: those that become DTensors too; otherwise they are broadcast.
    """
    replaced = set(_replaced(module, plan))
    if with_replaced:
        replaced -= {row.fqn for row in plan.parameters.values() if row.layout.dim is None}
    plain = (name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor))
    return [name for name in plain if name not in replaced]


def _refuse_ulysses_twice(resolved: ResolvedPlan) -> None:
    exchanging = [row for row in resolved.modules.values() if row.contract.exchanges_heads]
    if exchanging:
        what = f"{exchanging[0].fqn} exchanges tokens for heads over tp, and the mesh shards tokens over cp too"
        raise PlanError(
            Problem("ulysses-over-cp", what, exchanging[0].rule.where, fix="heads over tp, and ulysses= over cp")
        )


def _refuse_overlap_of_dtensors(resolved: ResolvedPlan) -> None:
    reason = passes_dtensors(resolved.plan)
    if reason and resolved.options.overlap != "off":
        what = f"collectives cannot overlap with matmuls where DTensors pass between modules: {reason}"
        fix = "use_local_output=True, or overlap=off"
        raise PlanError(Problem("no-overlap", what, fix=fix))


def _has_rules(resolved: ResolvedPlan) -> bool:
    """Whether it is more than a dict of styles of which none was lowered, or whose patterns match nothing."""
    return bool(resolved.plan.rules) or resolved.plan.on_unclaimed != "leave"


def _refuse_twice(module: nn.Module) -> None:
    if record_of(module) is not None:
        raise ModelError(
            Problem("already-parallelized", f"{type(module).__name__} has a plan", fix="apply one plan, once")
        )


def _check_modules(resolved: ResolvedPlan, model: ModelFacts, problems_so_far: list[Problem]) -> None:
    """What can only be seen on the modules themselves. others: problems of the full model. Raises: ModelError."""
    misused = dict.fromkeys(misused_shards(resolved, model))  # those of all layers read alike
    problems = [*problems_so_far, *problems_of_modules(resolved, model), *misused]
    if problems:
        raise ModelError(*problems[:20])


def _apply(module: nn.Module, mesh: MeshView, agreed: _Agreed, storage: Storage) -> None:
    tp, plan = mesh.tp, agreed.plan
    group = Group(tp.get_group())
    # of all pipeline stages, also of one without experts: every rank creates the groups
    folds = any(row.axis == "ep" for row in agreed.resolved.parameters.values())
    folded = mesh.folded(plan.options.expert_ranks) if folds else None
    sharder = Sharder(storage.src_data_rank, storage.weights_dtype, storage.device)
    sharder.shard(module, plan, partial(axis_of_layout, tp=tp, folded=folded))
    pending_reductions = PendingReductions()
    # styles that PyTorch applies may take shards of ids
    every = 0 if plan.plan.unlowered_styles else storage.compare_inputs_every
    inputs = InputCheck(group, every) if every else None
    experts = folded.group("ep") if folded is not None else None
    installer = Installer(tp, group, agreed.model, plan, pending_reductions, agreed.overlapped, inputs, experts)
    installer.run()
    record = PlanRecord(
        plan,
        mesh,
        tp,
        group,
        pending_reductions,
        overlap=installer.overlap,
        region=installer.region if plan.regions else None,
        inputs=inputs,
        folded=folded,
    )
    mark_applied(module, plan=record, resolved=agreed.resolved)
    _serve(module)
    set_up(PLANNED, Guarded(module, mesh, folded, plan, agreed.model))
    if storage.device is not None:
        _move_buffers(module, storage.device)
    if inputs is not None:
        inputs.install(module)


def _serve(module: nn.Module) -> None:
    """What stock code does with a model, for a planned one: state dicts, generation, moves, compilers, resizing."""
    install_state_hooks(module)
    install_generation(module)
    guard_buffers(module)
    guard_moves(module)
    count_optimizer_writes()
    follow_data_assignments()
    serve_compilers(module)
    serve_resizing(module)
    share_router_loss(module)


def _apply_unlowered(module: nn.Module, mesh: MeshView, agreed: _Agreed, storage: Storage) -> None:
    """Styles of a dict as PyTorch applies them. What an earlier plan of the model says stays."""
    resolved, cut, has_rules = agreed.resolved, pipeline_cut(module), _has_rules(agreed.resolved)
    is_second = record_of(module) is not None and not has_rules
    earlier = resolution_of(module) if is_second else None
    styles = [(item.fqn, item.style) for item in resolved.plan.unlowered_styles if cut is None or cut.present(item.fqn)]
    tp = mesh.tp
    by_rule = partial(_apply_alone, tp=tp, storage=storage, is_second=is_second)
    apply_styles(module, styles, tp, storage.src_data_rank, by_rule)
    if earlier is not None:
        unlowered_styles = (*earlier.plan.unlowered_styles, *resolved.plan.unlowered_styles)
        resolved = replace(earlier, plan=replace(earlier.plan, unlowered_styles=unlowered_styles))
    mark_applied(module, resolved=resolved)
    if not has_rules:  # whose application has set up the same, and more
        set_up(STYLED, Guarded(module, mesh, plan=agreed.plan, facts=agreed.model))


def _apply_alone(module: nn.Module, style: Any, *, tp: DeviceMesh, storage: Storage, is_second: bool) -> bool:
    """Apply a style of a second dict as a call for this module alone would; False where that has no rule either."""
    plan = plan_of_styles(module, style) if is_second else None
    if plan is None or plan.unlowered_styles:
        return False
    spec, unchecked = MeshSpec([("tp", tp.size())]), replace(storage, check_replicated=False)
    apply_plan(module, MeshView(tp), lambda: resolve(plan, facts_of(module), spec, Options()), unchecked)
    return True


def _move_buffers(module: nn.Module, device: torch.device | str) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device=device)
        return
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)
