"""Head counts and widths that a stock forward reads, and their values on one rank.

Floor 2: torch-free.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from parallelize.errors import Problem, did_you_mean
from parallelize.plan.layouts import LayoutMaker, dotted
from parallelize.plan.model import ModelFacts
from parallelize.plan.pattern import generic, matches
from parallelize.plan.schema import LocalAttribute, Plan


def local_attributes(
    plan: Plan, model: ModelFacts, sizes: LayoutMaker
) -> tuple[dict[str, dict[str, int]], list[Problem]]:
    """Module fqn -> attribute -> value on each rank, and what is wrong. Unchanged values are left out."""
    found: dict[str, dict[str, int]] = {}
    problems: list[Problem] = []
    for item in plan.local:
        matched = [name for name in model.modules if matches(item.pattern, name)]
        if not matched:
            problems.append(Problem("unmatched-rule", f"{item.pattern!r} under `local` matches no module", item.where))
        scale = _scale(item, sizes)
        for name in matched:
            value = dotted(model.objects[name], item.attribute)
            problem = _check(item, name, value, scale, model.objects[name])
            if problem:
                problems.append(problem)
            elif scale is not None and scale != 1:
                found.setdefault(name, {})[item.attribute] = int(value * scale)
    return found, problems


def _scale(item: LocalAttribute, sizes: LayoutMaker) -> Fraction | None:
    """Local over full size; None where the sizes are missing or do not divide (reported where they split a weight)."""
    scale = Fraction(1)
    for name, power in ((item.size, 1), (item.divide_by, -1)):
        if name:
            full, local = sizes.size(name), sizes.local_size(name)
            if full is None or local is None:
                return None
            scale *= Fraction(local, full) ** power
    return scale


def _check(item: LocalAttribute, name: str, value: Any, scale: Fraction | None, module: Any) -> Problem | None:
    if not isinstance(value, int) or isinstance(value, bool):
        known = [key for key, held in vars(module).items() if isinstance(held, int) and not key.startswith("_")]
        what = f"{generic(name)} has no whole number `{item.attribute}`"
        return Problem("missing-attribute", what, item.where, fix=did_you_mean(item.attribute, known))
    if scale is not None and (value * scale).denominator != 1:
        what = f"{generic(name)}.{item.attribute} = {value} does not become whole times {scale}"
        return Problem("uneven-attribute", what, item.where)
    return None
