"""`parallelize_module`: a plan applied to a model. The one place that changes a model.

The order is the text of `_apply`: choose, resolve, shake hands, and only then shard and install. A failure after that
point puts everything back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.context.apply import check_context, context_parallel, on_context
from parallelize.errors import MeshError, ModelError, ParallelizeError, PlanError, Problem
from parallelize.forwards import argument_of
from parallelize.fuse_loss import wrong_heads
from parallelize.generation.stock import install_generation
from parallelize.gradients import Ledger
from parallelize.groups import Group, mesh_spec, tp_mesh
from parallelize.handshake import TIMEOUT_S, agree_on, check_replicas, watch_inputs
from parallelize.installer import Installer
from parallelize.meta import guard_buffers
from parallelize.moves import guard_moves, refuse_ddp
from parallelize.overlap import SiteRow, check_sites
from parallelize.pipeline.cut import cut_of, part_of
from parallelize.plan.choose import plan_of
from parallelize.plan.model import ModelFacts, describe
from parallelize.plan.resolve import ResolvedPlan, for_base_model, resolve
from parallelize.plan.schema import Plan
from parallelize.sharding import Record, Sharder, record_of
from parallelize.special import check_embedding, check_rms_norm, reads_of_children
from parallelize.state import install_state_hooks
from parallelize.styles.contract import Edge
from parallelize.torch_styles import dicts as faces
from parallelize.transaction import Transaction
from parallelize.ulysses_attention import check_ulysses

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
    ulysses: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    check_replicated: bool = False,
    handshake_timeout_s: float = TIMEOUT_S,
) -> nn.Module:
    """Apply tensor, sequence and loss parallelism to a stock module, in place, and return it.

    Args:
        module: holds weights, or lies on the meta device (materialise it afterwards with `to_empty`).
        device_mesh: its axis named `tp` is used; a 1-D mesh without names is `tp`. None: the surrounding `with mesh:`.
        parallelize_plan: a shipped plan's name, a path to a YAML file, a `Plan`, one style, a dict of name patterns to
            styles as PyTorch's own function takes it, or None to choose by the model.
        src_data_rank: the rank of the `tp` group whose weights count; None: each rank slices its own.
        sequence_parallel, loss_parallel: over the plan's defaults.
        fuse_loss: over the plan's default: the head returns `DeferredLogits`, and the loss makes them in chunks of tokens.
        overlap: "auto", "off", "chunked" or "symm_mem" over the plan's default: collectives run beside products. "auto"
            measures link and matmuls once, at the first forward, and overlaps where that pays; `overlap_report` tells.
        ulysses: where the mesh has an axis `cp`: see `context_parallel`, which is then applied too.
        dtype, device: of the stored parameters.
        check_replicated: compare replicated parameters now, and the inputs at each forward, over `tp` by digest.
        handshake_timeout_s: how long ranks wait for each other before any is named as missing.

    Returns: the same module; its parameters are DTensors, its activations plain local tensors.
    Raises: PlanError, ModelError, MeshError, ShapeError before anything is changed; HandshakeError where ranks differ.
        The same on every rank.
    """
    mesh = device_mesh if device_mesh is not None else private.current_mesh()
    if not isinstance(mesh, DeviceMesh):
        what = "no device_mesh was given" if mesh is None else f"device_mesh is a {type(mesh).__name__}"
        fix = 'parallelize_module(model, build_mesh("cuda", tp=8), plan), after init_process_group'
        raise MeshError(Problem("no-mesh", what, fix=fix))
    tp = tp_mesh(mesh)
    if faces.is_style(parallelize_plan) or faces.is_style_dict(parallelize_plan):
        _refuse_overlap_of_styles(overlap)
        _refuse_fused_styles(fuse_loss)
        return _apply_styles(module, mesh, tp, parallelize_plan, src_data_rank, handshake_timeout_s)
    cut = cut_of(module)
    model = describe(module) if cut is None else cut.facts
    settings = {"dtype": str(dtype), "src_data_rank": str(src_data_rank), "check_replicated": str(check_replicated)}
    settings |= {"ulysses": str(ulysses)}
    choices = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel, "overlap": overlap}
    choices["fuse_loss"] = fuse_loss
    together = _resolved_together(model, mesh, parallelize_plan, choices, settings, handshake_timeout_s)
    model, resolved, whole, sites = together
    with Transaction(module):
        _apply(module, mesh, tp, model, resolved, whole, sites, src_data_rank, dtype, device, check_replicated)
        context_parallel(module, mesh, whole.plan, ulysses=ulysses)
    return module


def _resolved_together(
    model: ModelFacts,
    mesh: DeviceMesh,
    given: Any,
    choices: dict[str, Any],
    settings: dict[str, str],
    timeout_s: float,
) -> tuple[ModelFacts, ResolvedPlan, ResolvedPlan, tuple[SiteRow, ...]]:
    """(model, plan) of this rank's part of the model, the whole plan, overlapped sites; or the same error on every rank."""
    tp = tp_mesh(mesh)
    with agree_on(mesh, timeout_s) as facts:
        facts |= {f"option {key}": value for key, value in settings.items()}
        facts |= {f"parameter {key}": value for key, value in model.structure().items()}
        _refuse_twice(model.root)
        resolved = resolve(plan_of(model.root, given).with_options(**choices), model, tp.size())
        facts |= {f"plan {key}": value for key, value in resolved.plan.facts().items()}
        if on_context(mesh_spec(mesh)):
            check_context(for_base_model(resolved.plan, model), model, mesh_spec(mesh), int(settings["ulysses"]))
            _refuse_ulysses_twice(resolved)
        mine = part_of(model)
        local = resolved.restricted(mine)
        _check_modules(local, mine)
        sites = check_sites(local, mine, Group(tp.get_group()), torch.device(mesh.device_type))
    return mine, local, resolved, sites


def _refuse_ulysses_twice(resolved: ResolvedPlan) -> None:
    traded = [row for row in resolved.modules.values() if row.contract.compute == "ulysses"]
    if traded:
        what = f"{traded[0].fqn} trades its rows for heads over tp, and the mesh cuts rows over cp too"
        raise PlanError(
            Problem("ulysses-over-cp", what, traded[0].rule.where, fix="heads over tp, and ulysses= over cp")
        )


def _refuse_overlap_of_styles(overlap: str | None) -> None:
    if overlap not in (None, "off"):
        fix = (
            "write the same as a plan of `gather`, `colwise`, `rowwise`; or call parallelize.all_gather_linear yourself"
        )
        raise PlanError(Problem("no-overlap", "overlap works on plans, not on PyTorch's style objects", fix=fix))


def _refuse_fused_styles(fuse_loss: bool | None) -> None:
    if fuse_loss:
        fix = "write the same as a plan, the head as `colwise(output=vocabulary)`; or call parallelize.linear_cross_entropy"
        what = "fuse_loss works on plans, not on PyTorch's style objects"
        raise PlanError(Problem("no-vocabulary-output", what, fix=fix))


def _refuse_twice(module: nn.Module) -> None:
    if record_of(module) is not None:
        raise ModelError(
            Problem("already-parallelized", f"{type(module).__name__} has a plan", fix="apply one plan, once")
        )


def _check_modules(resolved: ResolvedPlan, model: ModelFacts) -> None:
    """What can only be seen on the module itself: still before anything is changed."""
    problems = wrong_heads(resolved, model)
    for fqn, row in resolved.modules.items():
        module = model.objects[fqn]
        try:
            if row.contract.compute == "embedding":
                check_embedding(module, fqn)
            elif row.contract.compute == "rms_norm":
                check_rms_norm(module, fqn)
            elif row.contract.compute == "ulysses":
                check_ulysses(module, fqn)
            if row.contract.enter is not Edge.NONE:
                argument_of(module, row.contract.argument)
        except ParallelizeError as error:
            problems += [
                Problem(p.slug, f"{fqn}: {p.what}", p.where or row.rule.where, p.rows, p.fix) for p in error.problems
            ]
    for name, parameter in model.root.named_parameters():
        problems += _wrong_with_parameter(name, parameter)
    problems += [
        Problem(
            "reads-child-parameters",
            f"{fqn} is a {type(module).__name__}, whose code reads parameters from outside the module that holds them",
            fix="replace it by modules that call each other, or plan only what lies beside it",
        )
        for fqn, module in model.objects.items()
        if isinstance(module, (nn.MultiheadAttention, nn.ParameterList, nn.ParameterDict)) and list(module.parameters())
    ]
    problems += [
        Problem(
            "reads-child-parameters",
            f"{type(module).__name__} reads self.{child}.{key} from outside the module that holds it",
            fix="replace it by modules that call each other, or plan only what lies beside it",
        )
        for module in {type(module): module for module in model.objects.values()}.values()
        for child, key in reads_of_children(module.__class__)
        if isinstance(getattr(module, child, None), nn.Module) and key in getattr(module, child)._parameters
    ]
    if problems:
        raise ModelError(*problems[:20])


def _wrong_with_parameter(name: str, parameter: Any) -> Iterator[Problem]:
    if isinstance(parameter, DTensor):
        yield Problem("already-parallelized", f"parameter {name} is a DTensor", fix="apply one plan, once, to all")
    if parameter.grad is not None:
        yield Problem("gradient-present", f"parameter {name} has a gradient", fix="call zero_grad() first")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        fix = "register it after parallelize_module: it then gets the DTensor gradient"
        yield Problem("hook-on-parameter", f"parameter {name} has a hook, which would be lost", fix=fix)


def _apply(
    module: nn.Module,
    mesh: DeviceMesh,
    tp: DeviceMesh,
    model: ModelFacts,
    resolved: ResolvedPlan,
    whole: ResolvedPlan,
    sites: tuple[SiteRow, ...],
    src_data_rank: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    check_replicated: bool,
) -> None:
    group = Group(tp.get_group())
    if check_replicated:
        copies = {
            row.fqn: module.get_parameter(row.fqn) for row in resolved.parameters.values() if row.layout.dim is None
        }
        check_replicas(group, copies, "replicated parameters")
    Sharder(tp, group, src_data_rank, dtype, device).shard(module, resolved)
    ledger = Ledger()
    installer = Installer(group, model, resolved, ledger, sites)
    installer.run()
    module.__dict__["_parallelize_record"] = Record(
        resolved,
        mesh,
        tp,
        group,
        ledger,
        installer.overlap,
        installer.region if resolved.region else None,
        whole,
    )
    install_state_hooks(module)
    install_generation(module)
    guard_buffers(module)
    guard_moves(module)
    refuse_ddp(module)
    if device is not None:
        _move_buffers(module, device)
    if check_replicated:
        watch_inputs(module, group)


def _move_buffers(module: nn.Module, device: torch.device | str) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device=device)
        return
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)


def _apply_styles(
    module: nn.Module, mesh: DeviceMesh, tp: DeviceMesh, styles: Any, src_data_rank: int | None, timeout_s: float
) -> nn.Module:
    """PyTorch's own form of a plan: styles by name pattern. What no pattern names stays as it is."""
    with agree_on(mesh, timeout_s) as facts:
        facts |= {f"parameter {key}": value for key, value in describe(module).structure().items()}
        matched = faces.match_styles(module, styles)
        facts |= {f"style {name}": faces.spelled(style) for name, _, style in matched}
    with Transaction(module):
        faces.apply_styles(module, matched, tp, src_data_rank)
    return module
