"""What `lint` finds about the experts of a mixture: widths of a rank's part that PyTorch's grouped matmul does not take."""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.axes.tensor.experts.expert_widths import widths_that_need
from parallelize.base.errors import Problem
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan


def padded_experts(resolved: ResolvedPlan, itemsize: int) -> Iterator[Problem]:
    """`padded-experts`, once for each kind of module, where experts are padded in a dtype of `itemsize` bytes."""
    reported: set[str] = set()
    for fqn, row in resolved.modules.items():
        name, contract = generic(fqn), row.contract
        if not (contract.splits_experts or contract.sends_tokens) or name in reported:
            continue
        own = [parameter.layout for key, parameter in resolved.parameters.items() if key.rpartition(".")[0] == fqn]
        if widths := widths_that_need(own, itemsize):
            reported.add(name)
            listed = ", ".join(f"{width} x {itemsize} bytes" for width in widths)
            what = f"rows of a rank's part of {name} have {listed}: grouped matmuls take multiples of 16 bytes"
            fix = f"correct, but weights are copied to be padded; a width that is a multiple of {16 // itemsize} on each rank"
            yield Problem("padded-experts", what, row.rule.where, fix=fix)
