"""Arguments of modules that have a part for each head, such as ALiBi's biases: which heads each rank takes. And those whose width is read.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from parallelize.base.errors import Problem
from parallelize.base.layout import Chunk, packed
from parallelize.plan.parameter_layouts import LayoutMaker
from parallelize.plan.pattern import matches
from parallelize.plan.rows import ModuleRow
from parallelize.plan.schema import Plan
from parallelize.plan.styles.contract import InputShard, InputWidth


def with_local_inputs(
    plan: Plan, rows: dict[str, ModuleRow], layouts: LayoutMaker
) -> tuple[dict[str, ModuleRow], list[Problem]]:
    """(the rows, with what the plan says of their arguments, problems)."""
    rows, problems = dict(rows), []
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
                widths = (*contract.input_widths, width)
                rows[name] = replace(rows[name], contract=replace(contract, input_widths=widths))
            continue
        chunk = Chunk(heads, heads, size.replicate_below_tp, item.size)
        owned = packed((heads,), 0, layouts.tp_size, [chunk]).owned
        shard = InputShard(item.argument, item.dim, heads, tuple(first for (first,) in owned))
        for name in matched:
            contract = rows[name].contract
            rows[name] = replace(rows[name], contract=replace(contract, inputs=(*contract.inputs, shard)))
    return rows, problems
