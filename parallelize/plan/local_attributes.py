"""Local values of the head counts and widths that a stock forward reads from its module.

Torch-free.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from parallelize.errors import Problem, did_you_mean
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.parameter_layouts import LayoutMaker, dotted
from parallelize.plan.pattern import generic, matches
from parallelize.plan.schema import LocalAttribute, Plan


def local_attributes(
    plan: Plan, model: ModelFacts, sizes: LayoutMaker
) -> tuple[dict[str, dict[str, int]], list[Problem]]:
    """(module fqn to attribute to local value, problems). Values that stay the same are not listed."""
    values: dict[str, dict[str, int]] = {}
    problems: list[Problem] = []
    for item in plan.local:
        matched = [name for name in model.modules if matches(item.pattern, name)]
        if not matched and not item.optional:
            problems.append(Problem("unmatched-rule", f"{item.pattern!r} under `local` matches no module", item.where))
        scale = _scale(item, sizes)
        for name in matched:
            value = dotted(model.objects[name], item.attribute)
            problem = _check(item, name, value, scale, model.objects[name])
            if problem:
                problems.append(problem)
            elif scale is not None and scale != 1:
                values.setdefault(name, {})[item.attribute] = int(value * scale)
    return values, problems


def _scale(item: LocalAttribute, sizes: LayoutMaker) -> Fraction | None:
    """Local over full size; None where a size is missing or not divisible, which the layouts of weights report."""
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
        known = [key for key, number in vars(module).items() if isinstance(number, int) and not key.startswith("_")]
        what = f"{generic(name)} has no integer attribute `{item.attribute}`"
        return Problem("missing-attribute", what, item.where, fix=did_you_mean(item.attribute, known))
    if scale is not None and (value * scale).denominator != 1:
        what = f"{generic(name)}.{item.attribute} = {value} is not an integer when multiplied by {scale}"
        return Problem("uneven-attribute", what, item.where)
    return None
