"""What a stock forward reads and each rank has locally: head counts and widths of its module, arguments by heads,
shards of inputs.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from parallelize.base.errors import ModelError, Problem, did_you_mean
from parallelize.base.layout import Chunk, packed
from parallelize.base.mesh import DATA_AXES, MeshSpec
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.parameter_layouts import LayoutMaker
from parallelize.plan.pattern import generic, matches
from parallelize.plan.resolved import ModuleRow
from parallelize.plan.schema import LocalAttribute, Plan
from parallelize.plan.styles.contract import InputShard, InputWidth

Attributes = dict[str, dict[str, int]]
"""Module fqn -> attribute -> its value on a rank. Values that stay the same are not listed."""


def local_attributes(plan: Plan, model: ModelFacts, sizes: LayoutMaker) -> tuple[Attributes, list[Problem]]:
    """(the attributes under `local:`, problems)."""
    values: Attributes = {}
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


# -- input shards ----------------------------------------------------------------------------------------------------
# Arguments of modules that have a part for each head, such as ALiBi's biases: which heads each rank takes. And those
# whose width is read. Torch-free.


def with_local_inputs(
    plan: Plan, rows: dict[str, ModuleRow], layouts: LayoutMaker
) -> tuple[dict[str, ModuleRow], list[Problem]]:
    """(the rows, with what the plan says of their arguments, problems)."""
    rows, problems = dict(rows), []
    for attribute in plan.local:
        matched = [name for name in rows if attribute.elsewhere_full and matches(attribute.pattern, name)]
        if attribute.elsewhere_full and not matched and not attribute.optional:
            what = f"{attribute.pattern!r} under `local`, with `elsewhere=full`, matches no module that has a rule"
            problems.append(Problem("unmatched-rule", what, attribute.where))
        for name in matched if layouts.tp_size > 1 else ():
            rows[name] = replace(rows[name], contract=replace(rows[name].contract, sizes_by_tensor=True))
    for item in plan.local_inputs:
        matched = [name for name in rows if matches(item.pattern, name)]
        if not matched and not item.optional:
            what = f"{item.pattern!r} under `local_inputs` matches no module that has a rule"
            problems.append(Problem("unmatched-rule", what, item.where))
        heads, local, size = layouts.size(item.size), layouts.local_size(item.size), plan.sizes[item.size]
        if heads is None or local is None:
            continue  # which the layouts of weights report
        if item.dim is None:
            width = InputWidth(item.argument, heads, local)
            for name in matched:
                contract = rows[name].contract
                widths, both = (*contract.input_widths, width), contract.sizes_by_tensor or item.elsewhere_full
                contract = replace(contract, input_widths=widths, sizes_by_tensor=both and local != heads)
                rows[name] = replace(rows[name], contract=contract)
            continue
        chunk = Chunk(heads, heads, size.replicate_below_tp, item.size)
        owned = packed((heads,), 0, layouts.tp_size, [chunk]).owned
        shard = InputShard(item.argument, item.dim, heads, tuple(first for (first,) in owned))
        for name in matched:
            contract = rows[name].contract
            rows[name] = replace(rows[name], contract=replace(contract, inputs=(*contract.inputs, shard)))
    return rows, problems


# -- mixed rows ------------------------------------------------------------------------------------------------------
# Models whose output for one sequence depends on the other sequences of its batch: a part of the batch has other
# numbers. Every data rank and every microbatch would compute the numbers of a smaller batch, where all else here
# computes those of the full one. Torch-free.


MIXING = {"DogeCDMoE": "its router views the scores of all tokens of the batch as two halves"}
"""Class of a module to what mixes the rows of its batch. [transformers 5.23, modeling_doge.py]"""


def check_batch_parts(objects: Mapping[str, Any], mesh: MeshSpec, num_microbatches: int = 1) -> None:
    """Raises: ModelError `mixes-rows` where the batch of a model that mixes its rows is divided.

    Args:
        objects: the modules of the model, by fqn.
        mesh: of its axes those that divide the batch.
        num_microbatches: of a step.
    """
    parts = [(f"{axis}={mesh.ranks(axis)}", mesh.ranks(axis)) for axis in DATA_AXES]
    parts.append((f"num_microbatches={num_microbatches}", num_microbatches))
    dividing = [text for text, count in parts if count > 1]
    mixing = _mixing(objects.items()) if dividing else None
    if mixing is not None:
        fqn, why = mixing
        what = f"{fqn} mixes the rows of its batch, which {' and '.join(dividing)} would divide: {why}"
        fix = "one data rank, and num_microbatches=1"
        raise ModelError(Problem("mixes-rows", what, fix=fix))


def _mixing(modules: Iterable[tuple[str, Any]]) -> tuple[str, str] | None:
    """(fqn, why) of the first module that mixes rows."""
    for fqn, module in modules:
        if why := MIXING.get(type(module).__name__):
            return fqn, why
    return None
