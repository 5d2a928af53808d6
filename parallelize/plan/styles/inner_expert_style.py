"""The contract of `experts` whose weights are in modules inside of the one that computes with them.

Its uses name these weights from that module, such as `mlp.w1`.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.styles.contract import Contract, Conversion, Use
from parallelize.plan.styles.style import ModuleFacts, StyleContext


def inner_experts(module: ModuleFacts, context: StyleContext) -> Contract:
    """Whole experts on each rank, or each split over its inner width. Tokens [N, hidden] are converted, flattened.

    A router inside chooses for this rank's tokens, as one outside does. A bias of the sum over experts is added to these.
    """
    uses, on = _uses(module, context), context.sequence_parallel
    uses |= {name: Use(partial=on) for name in module.shapes}
    if context.sends_tokens:
        enter, leave = (Conversion.NONE, Conversion.NONE) if on else (Conversion.SPLIT_TOKENS, Conversion.GATHER_TOKENS)
        return Contract("experts", enter, leave, sequence_dim=0, uses=uses, compute="whole experts")
    enter = Conversion.GATHER_SEQUENCE if on else Conversion.COPY
    leave = Conversion.SCATTER_SEQUENCE if on else Conversion.REDUCE
    return Contract("experts", enter, leave, sequence_dim=0, uses=uses, compute="experts")


def _uses(module: ModuleFacts, context: StyleContext) -> dict[str, Use]:
    if module.kind == "expert block":
        split = {"input_linear.weight": Use(1, chunks=2), "output_linear.weight": Use(2)}
        if not context.sends_tokens:
            return split
        return {name: replace(use if context.etp > 1 else Use(0), by_expert=True) for name, use in split.items()}
    if context.etp > 1:
        what = f"the weights of {module.fqn} are rows of one expert after another, which no rank stores as one interval"
        fix = "etp=1: whole experts over ep, or, without ep, experts split over tp"
        raise ModelError(Problem("experts-not-splittable", what, fix=fix))
    rows = Use(0, chunks=module.num_experts, by_expert=context.sends_tokens)
    return dict.fromkeys(module.inner, rows)
