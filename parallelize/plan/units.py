"""Units of a model: which modules ZeRO 3 gathers together, and which ones recompute their activations.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallelize.base.errors import ModelError, Problem, did_you_mean
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import alternatives, check_pattern, matches
from parallelize.plan.schema import Plan


def layers_of(plan: Plan) -> str:
    """The fqn of the module that contains the layers; empty where the plan does not name it."""
    source = plan.cuts or plan.layers_region
    return source.layers if source is not None else ""


def zero_units(
    plan: Plan, model: ModelFacts, *, patterns: Sequence[str] | None = None, layers: str = ""
) -> tuple[str, ...]:
    """The units of ZeRO 3: those that match `patterns`, else the plan's `zero: {units: ...}`, else the layers.

    Args:
        plan: for this model (`for_model`).
        patterns: the caller's choice; None: the plan's.
        layers: fqn of the layers where pipeline stages were cut; default: as the plan names it.

    Returns: fqns, in the model's order.
    Raises: ModelError `unmatched-unit` for a pattern, or one of its alternatives, that names no module.
    """
    names = [name for name in model.modules if name]
    if patterns is None:
        patterns = plan.zero_units
    if not patterns:
        layers = layers or layers_of(plan)
        return tuple(name for name in names if layers and name.rpartition(".")[0] == layers)
    for alternative in (alternative for pattern in patterns for alternative in alternatives(pattern)):
        if not any(matches(alternative, name) for name in names):
            what = f"no module matches the ZeRO unit {alternative!r}"
            raise ModelError(Problem("unmatched-unit", what, fix=did_you_mean(alternative, names)))
    return tuple(name for name in names if any(matches(pattern, name) for pattern in patterns))


def recompute_units(plan: Plan, model: ModelFacts, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """The modules that run again in backward: those that match `patterns`, else the plan's `recompute:`, else the layers.

    Args:
        plan: for this model (`for_model`).
        patterns: the caller's choice; None: the plan's.

    Returns: fqns, in the model's order.
    Raises: PlanError of patterns; ModelError `no-recompute-units` where there are none, `nested-units`.
    """
    names = [name for name in model.modules if name]
    if patterns is None:
        patterns = _planned(plan, model)
    chosen: set[str] = set()
    for pattern in patterns:
        check_pattern(pattern, "recompute units")
        for alternative in alternatives(pattern):
            matched = {name for name in names if matches(alternative, name)}
            if not matched:
                what = f"no module is called {alternative!r}"
                raise ModelError(Problem("no-recompute-units", what, fix=did_you_mean(alternative, names)))
            chosen |= matched
    units = tuple(name for name in names if name in chosen)
    for name in units:
        parent = next((other for other in units if name.startswith(other + ".")), None)
        if parent is not None:
            what = f"{name} is inside {parent}, and both are to be recomputed"
            raise ModelError(Problem("nested-units", what, fix="name one of them"))
    return units


def _planned(plan: Plan, model: ModelFacts) -> Sequence[str]:
    layers = layers_of(plan)
    if plan.recompute_units or layers:
        return plan.recompute_units or [f"{layers}.*"]
    what = f"plan {plan.name}, which names neither units nor layers" if plan.rules else "no plan"
    fix = 'recompute(model, units="model.layers.*"), or `recompute: {units: [...]}` in the plan'
    raise ModelError(Problem("no-recompute-units", f"{type(model.root).__name__} has {what}", fix=fix))
