"""Linears that compute in float8, on shards: which widths the matmul of float8 takes."""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.base.errors import Problem
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.float8_linears import is_float8_linear
from parallelize.plan.resolved import ResolvedPlan

_MULTIPLE = 16  # of inputs and outputs, in `torch._scaled_mm`


def wrong_float8_widths(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """A problem for each linear that has widths which its matmul takes, and on a rank has not."""
    for fqn, row in resolved.modules.items():
        module = model.objects[fqn]
        weight = resolved.parameters.get(f"{fqn}.weight")
        if weight is None or weight.layout.dim is None or not is_float8_linear(module):
            continue
        config = getattr(module, "config", None)
        if getattr(config, "emulate", False) or getattr(config, "pad_inner_dim", False):
            continue
        full = weight.layout.shape[weight.layout.dim]
        widths = {weight.layout.local_size(rank) for rank in range(weight.layout.num_ranks)}
        wrong = sorted(width for width in widths if width % _MULTIPLE)
        if full % _MULTIPLE == 0 and wrong:
            what = f"{fqn} computes in float8, whose matmuls take multiples of {_MULTIPLE}, and a rank has {wrong[0]} of {full} features"
            fix = f"fewer ranks of tp, or leave it out where torchao converts the model: module_filter_fn=lambda _, name: name != {fqn!r}"
            yield Problem("float8-width", what, row.rule.where, fix=fix)
