"""What `lint` finds by following the dims of a plan through one forward on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from parallelize.analysis.record.attention_model import forwards_on_meta
from parallelize.dims.classes import Classes
from parallelize.dims.plan_check import PlanCheck
from parallelize.dims.trace import record_forward
from parallelize.errors import Problem
from parallelize.plan.resolved import ResolvedPlan


def dims_problems(model: nn.Module, inputs: Mapping[str, Any], resolved: ResolvedPlan) -> Iterator[Problem]:
    """Operations that need all of what the plan shards, and parameters that it shards differently from what they meet.

    Args:
        model: on the meta device; layers that equal others may be left out. inputs: keyword arguments of its forward.
        resolved: the plan over `tp`, without sequence parallelism.
    """
    inputs = {name: value for name, value in inputs.items() if name != "targets"}
    with forwards_on_meta(model):
        classes = Classes(record_forward(model, inputs), model)
    yield from PlanCheck(classes, resolved).problems()
