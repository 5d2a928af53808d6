"""What `lint` and `explain` find in a model: by following the dims of a plan through one forward, over `cp`, and in its
experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from parallelize.axes.tensor.experts.expert_tensor_parallel import widths_that_need
from parallelize.base.errors import Problem
from parallelize.plan.adapters import makes_prefixes
from parallelize.plan.dims.plan_check import trace_plan
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan
from parallelize.tools.analysis.record.attention_model import forwards_on_meta


def dims_findings(model: nn.Module, inputs: Mapping[str, Any], resolved: ResolvedPlan) -> Iterator[tuple[str, Problem]]:
    """(severity, problem): operations that need all of what the plan shards, and parameters that meet others than it
    shards.

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


# -- context findings ------------------------------------------------------------------------------------------------
# What `lint` and `explain` say about modules that are gathered over `cp`.


def gathered_modules(resolved: ResolvedPlan) -> dict[str, int]:
    """Generic name of the modules that run on the full sequence on every rank of `cp` -> how many there are."""
    return dict(Counter(generic(fqn) for fqn, kind in resolved.attention.items() if kind == "gathered"))


def gathered_over_cp(resolved: ResolvedPlan) -> Iterator[Problem]:
    """`gathered-over-cp`, once for each name."""
    cp = resolved.mesh.ranks("cp")
    for name, count in gathered_modules(resolved).items():
        what = (
            f"each of {cp} ranks of cp computes {name} ({count} modules) for all tokens, and stores its activations of "
            "the full sequence"
        )
        fix = (
            "correct, but cp does not divide these modules; recompute=full stores them for one layer at a time, and tp "
            "divides them"
        )
        yield Problem("gathered-over-cp", what, resolved.plan.source, fix=fix)


# -- expert findings -------------------------------------------------------------------------------------------------
# What `lint` finds about the experts of a mixture: widths of a rank's part that PyTorch's grouped matmul does not
# take.


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
            fix = (
                f"correct, but weights are copied to be padded; a width that is a multiple of {16 // itemsize} on each "
                "rank"
            )
            yield Problem("padded-experts", what, row.rule.where, fix=fix)
