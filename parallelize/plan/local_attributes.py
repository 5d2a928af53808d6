"""Local values of the head counts and widths that a stock forward reads from its module.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from parallelize.base.errors import Problem, did_you_mean
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
        for name in matched:
            value = dotted(model.objects[name], item.attribute)
            if value is None and item.if_present:
                continue
            scale = _scale(item, sizes) if not item.terms else _scale_of_sum(item, sizes, value)
            problem = _check(item, name, value, scale, model.objects[name], sizes)
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


def _scale_of_sum(item: LocalAttribute, sizes: LayoutMaker, value: Any) -> Fraction | None:
    """The same for a sum of products; None also where the attribute has another value than the full sum."""
    local = _sum_of(item, sizes, sizes.local_size)
    full = _sum_of(item, sizes, sizes.size)
    return Fraction(local, full) if local and full and full == value else None


def _sum_of(item: LocalAttribute, sizes: LayoutMaker, count_of: Callable[[str], int | None]) -> int | None:
    """The sum of the products, with these counts; None where a size is missing or not divisible."""
    total = 0
    for name, width in item.terms:
        count, factor = count_of(name), sizes.width(width)
        if count is None or factor is None:
            return None
        total += count * factor
    return total


def _check(
    item: LocalAttribute, name: str, value: Any, scale: Fraction | None, module: Any, sizes: LayoutMaker
) -> Problem | None:
    if not isinstance(value, int) or isinstance(value, bool):
        known = [key for key, number in vars(module).items() if isinstance(number, int) and not key.startswith("_")]
        what = f"{generic(name)} has no integer attribute `{item.attribute}`"
        return Problem("missing-attribute", what, item.where, fix=did_you_mean(item.attribute, known))
    full = _sum_of(item, sizes, sizes.size)
    if item.terms and full is not None and full != value:
        what = f"{generic(name)}.{item.attribute} is {value}, and {item} is {full}"
        return Problem("uneven-attribute", what, item.where, fix="check the sizes that it names")
    if scale is not None and (value * scale).denominator != 1:
        what = f"{generic(name)}.{item.attribute} = {value} is not an integer when multiplied by {scale}"
        return Problem("uneven-attribute", what, item.where)
    return None
