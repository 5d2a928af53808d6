"""What `lint` finds by following the dims of a plan through one forward on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from parallelize.base.errors import Problem
from parallelize.plan.dims.plan_trace import trace_plan
from parallelize.plan.learned_prompts import makes_prefixes
from parallelize.plan.resolved import ResolvedPlan
from parallelize.tools.analysis.record.attention_model import forwards_on_meta


def dims_findings(model: nn.Module, inputs: Mapping[str, Any], resolved: ResolvedPlan) -> Iterator[tuple[str, Problem]]:
    """(severity, problem): operations that need all of what the plan shards, and parameters that meet others than it shards.

    Args:
        model: on the meta device; layers that equal others may be left out. inputs: keyword arguments of its forward.
        resolved: the plan over `tp`.
    """
    if any(row.fact.packs != 1 or row.fact.counts != 1 for row in resolved.parameters.values()):
        return  # quantized weights, which other operations compute with
    if makes_prefixes(resolved.facts):
        return  # of all heads, of which a rank takes its own as the model runs
    inputs = {name: value for name, value in inputs.items() if name != "targets"}
    try:
        with forwards_on_meta(model):
            problems = trace_plan(model, inputs, resolved).problems
    except Exception as error:  # a forward may do what cannot be followed: what else was checked stands
        reason = (str(error).splitlines() or [""])[0]
        what = f"the dims of the forward cannot be followed ({type(error).__name__}: {reason})"
        yield "warning", Problem("cannot-run-forward", what, fix="check by `parallelize verify`")
        return
    yield from (("error", problem) for problem in problems)
