"""Which parameters are tied over pipeline stages: those that were one object, and those that a plan declares.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parallelize.base.errors import PlanError, Problem, did_you_mean
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ParameterRow
from parallelize.plan.schema import Plan, Tie


def tied_parameters(
    plan: Plan,
    model: ModelFacts,
    parameters: Mapping[str, ParameterRow],
    pp_ranks: Callable[[tuple[str, ...]], tuple[int, ...]],
) -> tuple[Tie, ...]:
    """The ties that the plan declares, and every other parameter that several pp ranks store.

    Args:
        parameters: the rows over `tp`.
        pp_ranks: names of parameters -> the pp ranks that store any of them.

    Raises: PlanError `unknown-parameter`, `tie-shapes-differ`, `tie-layouts-differ`.
    """
    if problems := [*_wrong_members(plan, model), *_wrong_layouts(plan, parameters)]:
        raise PlanError(*problems)
    declared = {name for tie in plan.ties for name in tie.members}
    shared = (
        Tie(fact.fqn, fact.names)
        for fact in model.parameters.values()
        if len(fact.names) > 1 and len(pp_ranks(fact.names)) > 1 and not declared & set(fact.names)
    )
    return (*plan.ties, *shared)


def _wrong_members(plan: Plan, model: ModelFacts) -> list[Problem]:
    problems = []
    for tie in plan.ties:
        unknown = [name for name in tie.members if name not in model.owners]
        for name in unknown:
            what = f"tie {tie.name} names {name!r}, which is not a parameter"
            problems.append(Problem("unknown-parameter", what, fix=did_you_mean(name, model.owners)))
        known = [name for name in tie.members if name not in unknown]
        shapes = {model.parameters[model.owners[name]].shape for name in known}
        if len(shapes) > 1:
            what = f"tie {tie.name} joins parameters of shapes {sorted(map(list, shapes))}"
            problems.append(Problem("tie-shapes-differ", what, fix="tie parameters of one shape"))
    return problems


def _wrong_layouts(plan: Plan, parameters: Mapping[str, ParameterRow]) -> list[Problem]:
    """Gradients of copies can be summed only where the copies have the same layout over tp."""
    problems = []
    rows_of = {name: row for row in parameters.values() for name in row.fact.names}
    for tie in plan.ties:
        members = {name: rows_of[name] for name in tie.members if name in rows_of}
        if len({(row.layout.dim, row.layout.owned) for row in members.values()}) > 1:
            what = f"members of {tie.name} are sharded differently over tp"
            rows = tuple((name, f"{row.rule.style}: dim {row.layout.dim}") for name, row in members.items())
            fix = "give them styles that shard the same dim: `embedding` and `colwise(output=vocabulary)`"
            problems.append(Problem("tie-layouts-differ", what, rows=rows, fix=fix))
    return problems
