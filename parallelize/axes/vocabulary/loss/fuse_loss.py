"""Heads that defer their matmul to the loss (`fuse_loss`), with or without tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.axes.vocabulary.logits.deferred_logits import defer, logits_of
from parallelize.axes.vocabulary.logits.head import Head, autocast_inputs
from parallelize.base.errors import PlanError, Problem
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.vocabulary_shard import Vocabulary
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.records import applied, mark_applied, part_of

T = torch.Tensor


def deferred_head(vocabulary: Vocabulary, sharded: bool) -> Callable:
    """The forward of a planned head. `sharded`: whether the computed logits stay sharded over the vocabulary."""

    def forward(self: Any, input: T) -> T:
        planned, parameters = self._applied.planned, self._parameters
        if planned.enter is not None:
            input = planned.enter(input)
        bias = None if planned.bias is None else planned.bias.local(parameters)
        return _deferred(self, input, planned.weight.local(parameters), bias, vocabulary, sharded)

    return forward


def wrong_heads(resolved: ResolvedPlan, model: ModelFacts) -> list[Problem]:
    """Heads whose forward is not that of `nn.Linear`."""
    return [
        Problem(
            "cannot-fuse-loss",
            f"{fqn} is a {type(model.objects[fqn]).__name__} with its own forward",
            row.rule.where,
            fix="apply the plan with fuse_loss=False, and use `parallelize.linear_cross_entropy` in your own loop",
        )
        for fqn, row in resolved.modules.items()
        if row.contract.defers_logits and not _is_linear(model.objects[fqn])
    ]


def watch_writes(head: nn.Module) -> None:
    """Watch the sharded weight of a head for writes while `fully_shard` replaces it with the gathered one."""
    weight: Any = head._parameters["weight"]
    with torch.no_grad():  # the local tensor too: foreach writes change only its version counter
        mark_applied(head, written_weight=(weight, weight.to_local()))


def mark_deferred(head: nn.Module) -> None:
    mark_applied(head, defers_logits=True)


def deferred_heads(module: nn.Module) -> list[str]:
    """Names of the modules whose matmul is deferred to the loss."""
    return [name for name, inner in module.named_modules() if applied(inner).defers_logits]


def fuse_heads(module: nn.Module, resolved: ResolvedPlan) -> None:
    """Make the heads that a plan names return `DeferredLogits`, in a model that is not sharded over `tp`. In place.

    Raises: PlanError `cannot-fuse-loss`.
    """
    local_facts = part_of(module, resolved.facts)
    local = resolved.restricted(local_facts)
    if problems := wrong_heads(local, local_facts):
        raise PlanError(*problems)
    for fqn, row in local.modules.items():
        head = local_facts.objects[fqn]
        if row.contract.defers_logits and head._parameters.get("weight") is not None:
            head.__dict__["forward"] = MethodType(_plain_head, head)
            mark_deferred(head)


def _plain_head(self: Any, input: T) -> T:
    return _deferred(self, input, self.weight, self.bias, Vocabulary(self.weight.shape[0], _ALONE), False)


def _deferred(module: Any, input: T, weight: T, bias: T | None, vocabulary: Vocabulary, sharded: bool) -> T:
    hidden, cast, bias = autocast_inputs(input, weight, bias)
    head = Head(cast, bias, vocabulary)
    if torch.compiler.is_compiling():  # a traced graph cannot contain deferred logits
        return logits_of(hidden, head, sharded and not applied(module).gathers_logits)
    return defer(hidden, head, sharded, (module._parameters["weight"], *applied(module).written_weight))


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


_ALONE = Group.alone()
