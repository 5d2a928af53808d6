"""Layers that replace planned ones, or get the name of a rule, after the plan: `model.lm_head = nn.Linear(...)`.

The plan is matched again, with the names and shapes of now; a new layer is sharded and installed as its rule says
before the next forward. Its values are those of the first rank of `tp`. Where the plan cannot say how, it is refused,
as every other parameter that was added is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.tensor.install.installer import Installer
from parallelize.axes.tensor.planned_forward import installed
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.plan.adapters import adapted_layers, is_adapter_parameter
from parallelize.plan.model_facts import ModelFacts, ParameterFacts, describe
from parallelize.plan.pattern import alternatives, is_default, matches
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.tensor_rows import TensorRows, tensor_rows
from parallelize.state.guards.early_optimizers import rebind_parameters
from parallelize.state.records import (
    PlanRecord,
    applied,
    axis_of_layout,
    mark_applied,
    pipeline_cut,
    record_of,
    resolution_so_far,
)
from parallelize.state.sharding import Sharder
from parallelize.state.state_dict import install_state_hooks


def plan_replaced_layers(model: nn.Module) -> None:
    """Plan the layers that were replaced since the model was planned. Nothing, if there are none.

    Raises: ModelError `added-parameter`, on every rank.
    """
    record = record_of(model)
    if record is None or record.group.size == 1 or record.resolved.plan.on_unclaimed == "leave":
        return
    facts = describe(model)
    names = list(_later_layers(record, facts))
    if not names:
        return
    _refuse(model, record, facts, names)
    merged = _with_new_facts(record.resolved.facts, facts, names)
    rows = _rows(record, merged, names)
    with torch.inference_mode(False):
        _plan(model, record, replace(merged, root=model), rows, names)


def _later_layers(record: PlanRecord, facts: ModelFacts) -> Iterator[str]:
    """Names of modules with parameters of their own that no plan has sharded, where a rule names them."""
    inside = tuple(f"{name}." for name in (*adapted_layers(facts), *_wrappers(record, facts)))
    for name, module in facts.objects.items():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        is_new = bool(own) and not any(isinstance(parameter, DTensor) for parameter in module.parameters())
        is_adapter = name.startswith(inside) or is_adapter_parameter(f"{name}.")
        has_rule = name in record.resolved.modules or _is_named(record, name)
        if is_new and has_rule and not is_adapter and installed(module) is None:
            yield name


def _wrappers(record: PlanRecord, facts: ModelFacts) -> Iterator[str]:
    """Modules that were put around planned ones: `block.inner`, where `block.up` is `block.inner.up` now.

    What is new in them is beside the planned layers and replaces none, whatever its name.
    """
    planned = record.resolved.modules
    for name, module in facts.objects.items():
        if name in planned or installed(module) is None:
            continue
        parts = name.split(".")
        for index in range(len(parts)):
            if ".".join((*parts[:index], *parts[index + 1 :])) in planned:
                yield ".".join(parts[:index])


def _is_named(record: PlanRecord, name: str) -> bool:
    patterns = (rule.pattern for rule in record.resolved.plan.rules if not is_default(rule.pattern))
    return any(matches(each, name) for pattern in patterns for each in alternatives(pattern))


def _refuse(model: nn.Module, record: PlanRecord, facts: ModelFacts, names: list[str]) -> None:
    data = applied(model).data
    reasons = {
        "the model is cut into pipeline stages": pipeline_cut(model) is not None,
        "its parameters are sharded over data axes (ZeRO 3)": data is not None and data.zero == 3,
        "collectives of its linears overlap with their matmuls": record.resolved.options.overlap != "off",
        "experts are of the plan's ranks": any(facts.modules[name].kind == "experts" for name in names),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise _added(names, reason)


def _added(names: list[str], reason: str) -> ModelError:
    what = f"{names[0]} was replaced or added after the plan, and {reason}"
    return ModelError(Problem("added-parameter", what, fix="change the model first, then apply the plan"))


def _with_new_facts(before: ModelFacts, now: ModelFacts, names: list[str]) -> ModelFacts:
    """What the plan saw, with the new layers: parameters of now are shards, whose shapes are not the model's."""
    new = set(names)
    stay: dict[str, ParameterFacts] = {}
    for fact in before.parameters.values():
        kept = tuple(name for name in fact.names if name in now.parameter_fqns and name.rpartition(".")[0] not in new)
        if kept:
            stay[kept[0]] = replace(fact, names=kept)
    parameters = {
        name: stay.get(name) or now.parameters[name]
        for name in now.parameters
        if name in stay or now.parameters[name].fqn.rpartition(".")[0] in new
    }
    modules = {
        name: now.modules[name] if name in new else before.modules.get(name, now.modules[name]) for name in now.modules
    }
    parameter_fqns = {alias: fact.fqn for fact in parameters.values() for alias in fact.names}
    return replace(
        before,
        modules=modules,
        objects=now.objects,
        module_fqns=now.module_fqns,
        parameters=parameters,
        parameter_fqns=parameter_fqns,
    )


def _rows(record: PlanRecord, facts: ModelFacts, names: list[str]) -> TensorRows:
    """The rows of the new layers."""
    try:
        rows = tensor_rows(record.resolved.plan, facts, record.group.size)
    except PlanError as error:
        raise _added(names, f"the plan does not fit it: {error.problems[0].what}") from error
    new = set(names)
    modules = {name: row for name, row in rows.modules.items() if name in new}
    parameters = {
        name: row for name, row in rows.parameters.items() if row.fqn.rpartition(".")[0] in new and not row.plain
    }
    return replace(rows, modules=modules, parameters=parameters, regions=(), attributes={})


def _plan(model: nn.Module, record: PlanRecord, facts: ModelFacts, rows: TensorRows, names: list[str]) -> None:
    resolved, over_all_axes = (_replaced(each, facts, rows) for each in (record.resolved, resolution_so_far(model)))
    before = {name: model.get_parameter(name) for name in rows.parameters}
    new = replace(resolved, modules=rows.modules, parameters=rows.parameters, regions=(), attributes={})
    Sharder(0, None, None).shard(model, new, partial(axis_of_layout, tp=record.tp, folded=record.folded))
    rebind_parameters([(old, model.get_parameter(name), rows.parameters[name].layout) for name, old in before.items()])
    part = replace(facts, modules={name: facts.modules[name] for name in names})
    installer = Installer(record.tp, record.group, part, resolved, record.pending_reductions, inputs=record.inputs)
    region: Any = record.region
    if region is not None:  # the one that knows the lengths of the forward
        installer.region = region
    installer.install_added()
    for name in names:
        mark_applied(model.get_submodule(name), name=name)
    mark_applied(model, plan=replace(record, resolved=resolved), resolved=over_all_axes)
    install_state_hooks(model)


def _replaced(resolved: ResolvedPlan, facts: ModelFacts, rows: TensorRows) -> ResolvedPlan:
    """The resolved plan with the rows of the new layers in the place of those before."""
    parameters: dict[str, ParameterRow] = {}
    for row in resolved.parameters.values():
        names = tuple(
            name
            for name in row.fact.names
            if facts.parameter_fqns.get(name) in facts.parameters and name not in _new(rows)
        )
        if names:
            parameters[names[0]] = replace(row, fact=replace(row.fact, names=names))
    modules = {name: row for name, row in resolved.modules.items() if name in facts.modules}
    return replace(resolved, facts=facts, modules=modules | rows.modules, parameters=parameters | dict(rows.parameters))


def _new(rows: TensorRows) -> set[str]:
    return {name for row in rows.parameters.values() for name in row.fact.names}
