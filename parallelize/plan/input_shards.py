"""Arguments of modules that have a part for each head, such as ALiBi's biases: which heads each rank takes.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from parallelize.errors import Problem
from parallelize.layout import Chunk, packed
from parallelize.plan.parameter_layouts import LayoutMaker
from parallelize.plan.pattern import matches
from parallelize.plan.rows import ModuleRow
from parallelize.plan.schema import Plan
from parallelize.styles.contract import InputShard


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
        heads, size = layouts.size(item.size), plan.sizes[item.size]
        if heads is None or layouts.local_size(item.size) is None:
            continue  # which the layouts of weights report
        chunk = Chunk(heads, heads, size.replicate_below_tp, item.size)
        owned = packed((heads,), 0, layouts.tp_size, [chunk]).owned
        shard = InputShard(item.argument, item.dim, heads, tuple(first for (first,) in owned))
        for name in matched:
            contract = rows[name].contract
            rows[name] = replace(rows[name], contract=replace(contract, inputs=(*contract.inputs, shard)))
    return rows, problems
