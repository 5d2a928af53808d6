"""Follows the dims of a plan through one forward of the stock model, and says which mistakes the plan has, before anything runs on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelize.base.errors import Problem
from parallelize.plan.dims.classes import Classes
from parallelize.plan.dims.plan_check import PlanCheck
from parallelize.plan.dims.planned_shards import computes_otherwise
from parallelize.plan.dims.trace import record_forward
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan


@dataclass(frozen=True)
class PlanTrace:
    """What one forward says about a plan.

    Attributes:
        problems: mistakes.
        not_followed: operations without a rule, with the modules that called them, through which no dim was followed.
        followed: parameters with a shard that was followed, those of all layers by one name.
    """

    problems: tuple[Problem, ...]
    not_followed: Mapping[str, str]
    followed: frozenset[str]


def trace_plan(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    resolved: ResolvedPlan,
    end: float | None = None,
) -> PlanTrace:
    """Record a forward with the boundaries of a plan, and compare them.

    Args:
        model: the stock model, on any device. inputs: of its forward.
        resolved: a plan over `tp`; with sequence parallelism, tokens are followed too.
        end: of `time.thread_time()`, when it is given up; None: never.

    Returns: what was found. Raises: TimeoutError; whatever the forward raises.
    """
    record = record_forward(model, inputs, resolved, end)

    def counts(module: str, is_known: bool) -> bool:
        return is_known and not computes_otherwise(resolved, module)

    check = PlanCheck(Classes(record, model, counts), resolved)
    unknown = {name: module for name, module in record.unknown.items() if not computes_otherwise(resolved, module)}
    return PlanTrace(tuple(check.problems()), unknown, frozenset(map(generic, check.shards)))
