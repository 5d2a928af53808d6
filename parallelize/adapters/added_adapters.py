"""Adapters that PEFT adds to a model after its plan: they are sharded as the rules of their layers say, before the next
forward.

Where ranks are not seeded alike, PEFT initializes adapters to other values on each rank, of which the first rank's
count. Optimizers that were built before that forward are given the new parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.adapters.prompts import serve_local_prefixes
from parallelize.axes.tensor.install.installer import Installer
from parallelize.axes.tensor.install.replaced_layers import plan_replaced_layers
from parallelize.axes.tensor.planned_forward import installed
from parallelize.base.errors import ModelError, Problem
from parallelize.plan.adapters import (
    BASE,
    ORIGINAL,
    adapted_layers,
    copied_layers,
    for_adapters,
    is_adapted,
    layer_name,
)
from parallelize.plan.model_facts import ModelFacts, describe
from parallelize.plan.pattern import alternatives, is_default, matches
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.schema import Plan, Rule
from parallelize.plan.tensor_rows import TensorRows, tensor_rows
from parallelize.state.guards.early_optimizers import rebind_parameters
from parallelize.state.later_changes import when_changed
from parallelize.state.quantization.quantized_linear import QuantizedLinear
from parallelize.state.records import (
    PlanRecord,
    applied,
    axis_of_layout,
    mark_applied,
    part_of,
    pipeline_cut,
    record_of,
    resolution_so_far,
)
from parallelize.state.sharding import Sharder
from parallelize.state.state_dict import install_state_hooks

_FIRST = "get_peft_model(model, config) first, then the plan"


def plan_later_adapters(model: nn.Module) -> None:
    """Plan adapters that are added to a planned model from now on, before its next forward."""
    serve_local_prefixes()
    _watch(model)
    mark_applied(model, plan_later=plan_added)


def _watch(model: nn.Module) -> None:
    when_changed(model, partial(_changed, weakref.ref(model)))


def _changed(root: weakref.ref[nn.Module]) -> None:
    model = root()
    if model is not None and not _waiting_hooks(model):
        model.register_forward_pre_hook(_before_forward, prepend=True)


def _waiting_hooks(model: nn.Module) -> list[int]:
    """The hook that a change has left on the model: there is one where something is to be planned before the next
    forward."""
    return [key for key, hook in model._forward_pre_hooks.items() if hook is _before_forward]


def _before_forward(model: nn.Module, _: Any) -> None:
    plan_added(model)


def plan_added(model: nn.Module) -> None:
    """Plan the adapters that were added since the model was planned. Nothing, if it has not changed or there are none.

    Raises: ModelError `added-parameter`.
    Cost: of a model that has not changed, a look at its hooks. Steps call it, so that it must not look at the modules.
    """
    hooks = _waiting_hooks(model)
    if not hooks:
        return
    for key in hooks:
        del model._forward_pre_hooks[key]
    try:
        _plan_added(model)
    except BaseException:
        _changed(weakref.ref(model))  # it is still to be planned, or refused again
        raise


def _plan_added(model: nn.Module) -> None:
    plan_replaced_layers(model)
    _watch(model)  # modules that are new may be given others
    record = record_of(model)
    if record is None or (record.group.size == 1 and record.folded is None):
        return
    facts = part_of(model, describe(model))
    _refuse_adapted_experts(record, facts)
    if record.group.size == 1:
        return
    added = _added_parameters(facts)
    edges = {region.leave for region in record.resolved.regions}
    planned = record.resolved.modules
    unplanned = [name for name in copied_layers(facts) if f"{name}.{ORIGINAL}" not in planned]
    copied = [name for name in unplanned if name in edges or applied(model).data is not None]
    cut = pipeline_cut(model)
    if cut is not None and not cut.facts.parameter_fqns.keys() >= added.keys():
        _changed(weakref.ref(model))  # a stage that is called by itself, which is refused: the next step takes them
        return
    if not added and not copied:
        return
    _refuse(model, record, facts, copied)
    _check_sizes(facts)
    with torch.inference_mode(False):
        _plan(model, record, facts, added)


def _added_parameters(facts: ModelFacts) -> dict[str, nn.Parameter]:
    """Plain parameters of adapted layers and their adapters, by first name; copies (`modules_to_save`) are DTensors
    already."""
    layers = adapted_layers(facts)
    inside = {name for layer in layers for name in _names_inside(facts, layer)}
    parameters = {name: facts.root.get_parameter(name) for name in facts.parameters if name in inside}
    return {name: parameter for name, parameter in parameters.items() if not isinstance(parameter, DTensor)}


def _names_inside(facts: ModelFacts, layer: str) -> Iterator[str]:
    yield from (f"{layer}.{key}" for key, _ in facts.objects[layer].named_parameters())


def _refuse_adapted_experts(record: PlanRecord, facts: ModelFacts) -> None:
    """Refuse adapters of experts that are divided over ranks: each adapter has all experts in one matrix."""
    for name in adapted_layers(facts):
        is_new = installed(facts.objects[name]) is None and hasattr(facts.objects[name], "parameter_name")
        if is_new and (record.folded is not None or record.resolved.options.expert_ranks > 1):
            what = f"adapters of {layer_name(name)} were added after the plan, and its experts are divided over ep"
            raise ModelError(Problem("added-parameter", what, fix=_FIRST))


def _refuse(model: nn.Module, record: PlanRecord, facts: ModelFacts, copied: list[str]) -> None:
    """Refuse what PEFT can only be asked for before the plan."""
    data = applied(model).data
    dropping = [name for name in adapted_layers(facts) for name in _dropping(facts.objects[name], name)]
    overlapped = [name for name in adapted_layers(facts) if _overlaps(facts.objects[f"{name}.{BASE}"])]
    reasons = {
        f"{dropping[0] if dropping else ''} would draw masks that depend on the mesh": bool(dropping),
        f"the collective of {overlapped[0] if overlapped else ''} overlaps with its matmul": bool(overlapped),
        f"{copied[0] if copied else ''} was copied, on a mesh with data axes": bool(copied) and data is not None,
        f"{copied[0] if copied else ''} is where sequence parallelism ends, and was copied": bool(copied)
        and data is None,
        "its plan is a dict of style objects": record.resolved.plan.on_unclaimed == "leave",
    }
    for reason, is_so in reasons.items():
        if is_so:
            what = f"adapters were added after the plan, and {reason}"
            raise ModelError(Problem("added-parameter", what, fix=_FIRST))


def _dropping(layer: nn.Module, name: str) -> Iterator[str]:
    """Dropout that no clock of the mesh was installed for."""
    for key, inner in layer.named_modules():
        if isinstance(inner, nn.Dropout) and inner.p > 0 and applied(inner).dropout is None:
            yield f"{name}.{key}"


def _check_sizes(facts: ModelFacts) -> None:
    """Refuse LoRA of the sizes of shards."""
    for name in adapted_layers(facts):
        base, layer = facts.objects[f"{name}.{BASE}"], facts.objects[name]
        sizes = (
            [
                (base.in_features, getattr(layer, "in_features", 0)),
                (base.out_features, getattr(layer, "out_features", 0)),
            ]
            if type(base) in (nn.Linear, QuantizedLinear)
            else []
        )
        if any(full != actual for full, actual in sizes):
            what = (
                f"the adapter of {name} has the sizes {sizes[0][1]} and {sizes[1][1]} of a shard, and the layer has "
                f"{sizes[0][0]} and {sizes[1][0]}"
            )
            raise ModelError(
                Problem("added-parameter", what, fix="import peft before parallelize_module, or add adapters before it")
            )


def _overlaps(base: nn.Module) -> bool:
    planned = installed(base)
    return planned is not None and planned.overlap is not None


def _plan(model: nn.Module, record: PlanRecord, facts: ModelFacts, added: dict[str, nn.Parameter]) -> None:
    plan, rows = _rows(record, facts, added)
    resolved = _renamed(record.resolved, plan, facts, rows)
    over_all_axes = resolution_so_far(model)
    if pipeline_cut(model) is None:  # of stages the plan of the full model is resolved again
        over_all_axes = _renamed(over_all_axes, plan, facts, rows)
    new = replace(resolved, modules=rows.modules, parameters=rows.parameters, regions=(), attributes={})
    Sharder(0, None, None).shard(model, new, partial(axis_of_layout, tp=record.tp, folded=record.folded))
    layouts = {name: row.layout for row in rows.parameters.values() for name in row.fact.names}
    rebind_parameters([(added.pop(name), model.get_parameter(name), layouts[name]) for name in list(added)])
    part = replace(facts, modules={name: facts.modules[name] for name in _modules_of(facts, rows)})
    Installer(record.tp, record.group, part, resolved, record.pending_reductions).install_added()
    mark_applied(model, plan=replace(record, resolved=resolved), resolved=over_all_axes)
    install_state_hooks(model)


def _rows(record: PlanRecord, facts: ModelFacts, added: Mapping[str, Any]) -> tuple[Plan, TensorRows]:
    """(the plan with its adapters, the rows of what was added)."""
    stock = record.resolved.plan
    plan = for_adapters(stock, facts)
    modules = {name.rpartition(".")[0] for name in added}
    new = {*added, *modules, *(name for name in adapted_layers(facts) if not _is_wrapped(facts, name))}
    named = [rule for rule in plan.rules if _names_any(rule, new)]
    # a default may have none of what was added
    rules = tuple(replace(rule, optional=rule.optional or is_default(rule.pattern)) for rule in named)
    options = replace(stock.options, loss_parallel=False, fuse_loss=False, ep=1, etp=1)
    used = {name for rule in rules for name in rule.style.sizes}
    sizes = {name: size for name, size in stock.sizes.items() if name in used}
    part = replace(
        plan, rules=rules, sizes=sizes, options=options, local=(), local_inputs=(), ties=(), on_unclaimed="replicate"
    )
    parameters = {name: facts.parameters[name] for name in added}
    names = {name: fact.fqn for fact in parameters.values() for name in fact.names}
    return plan, tensor_rows(part, replace(facts, parameters=parameters, parameter_fqns=names), record.group.size)


def _is_wrapped(facts: ModelFacts, name: str) -> bool:
    return installed(facts.objects[name]) is not None


def _names_any(rule: Rule, names: set[str]) -> bool:
    return any(matches(pattern, name) for pattern in alternatives(rule.pattern) for name in names)


def _modules_of(facts: ModelFacts, rows: TensorRows) -> dict[str, None]:
    modules = (fqn.rpartition(".")[0] for fqn in rows.parameters)
    return dict.fromkeys([*rows.modules, *modules])


def _renamed(resolved: ResolvedPlan, plan: Plan, facts: ModelFacts, rows: TensorRows) -> ResolvedPlan:
    """The resolved plan under the names of now: a layer with adapters is its wrapper's `base_layer`. Deleted adapters
    have no rows."""
    bases = (name for name in facts.modules if is_adapted(name) and name not in resolved.modules)
    by_layer = {layer_name(name): name for name in bases}

    def of_module(name: str) -> str:
        return by_layer.get(name, name)

    def of_parameter(row: ParameterRow) -> ParameterRow:
        keys = ((name.rpartition(".")[0], name.rpartition(".")[2]) for name in row.fact.names)
        return replace(row, fact=replace(row.fact, names=tuple(f"{of_module(module)}.{key}" for module, key in keys)))

    modules = {of_module(name): replace(row, fqn=of_module(name)) for name, row in resolved.modules.items()}
    modules = {name: row for name, row in modules.items() if name in facts.module_fqns}
    parameters = {
        row.fqn: row for row in map(of_parameter, resolved.parameters.values()) if row.fqn in facts.parameter_fqns
    }
    return replace(
        resolved, plan=plan, facts=facts, modules=modules | rows.modules, parameters=parameters | rows.parameters
    )
