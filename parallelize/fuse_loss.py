"""Heads that leave their product to the loss (`fuse_loss`), with a plan over `tp` or without one."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.deferred_logits import defer, logits_of
from parallelize.errors import PlanError, Problem
from parallelize.groups import Group
from parallelize.head import Head, autocast_inputs
from parallelize.ops.vocabulary import Vocabulary
from parallelize.pipeline.cut import cut_of, part_of
from parallelize.plan.model import ModelFacts, describe
from parallelize.plan.resolve import ResolvedPlan, resolve
from parallelize.plan.schema import Plan

T = torch.Tensor
DEFERRED = "deferred_head"  # what a contract's `compute` calls such a head
_OWES = "_parallelize_owes_logits"  # on a module whose product is left to the loss
_WRITTEN = "_parallelize_written_weight"  # on such a module: what an optimiser writes to under `fully_shard`


def deferred_head(vocabulary: Vocabulary, sharded: bool) -> Callable:
    """The forward of a planned head. `sharded`: what its logits are once somebody needs them."""

    def forward(self: Any, input: T) -> T:
        planned, parameters = self._planned, self._parameters
        if planned.enter is not None:
            input = planned.enter(input)
        bias = None if planned.bias is None else planned.bias.local(parameters)
        return _deferred(self, input, planned.weight.local(parameters), bias, vocabulary, sharded)

    return forward


def wrong_heads(resolved: ResolvedPlan, model: ModelFacts) -> list[Problem]:
    """Heads whose product is not known to be that of `nn.Linear`."""
    return [
        Problem(
            "cannot-fuse-loss",
            f"{fqn} is a {type(model.objects[fqn]).__name__} with a forward of its own",
            row.rule.where,
            fix="apply the plan with fuse_loss=False, and use `parallelize.linear_cross_entropy` in your own loop",
        )
        for fqn, row in resolved.modules.items()
        if row.contract.compute == DEFERRED and not _is_linear(model.objects[fqn])
    ]


def watch_writes(head: nn.Module) -> None:
    """Notice writes to the shard that a head's weight is now, while a gathered one stands in its place (`fully_shard`)."""
    weight: Any = head._parameters["weight"]
    with torch.no_grad():  # the tensor in it: foreach writes show there alone
        head.__dict__[_WRITTEN] = weight, weight.to_local()


def mark_deferred(head: nn.Module) -> None:
    head.__dict__[_OWES] = True


def deferred_heads(module: nn.Module) -> list[str]:
    """Names of the modules whose product is left to the loss."""
    return [name for name, inner in module.named_modules() if inner.__dict__.get(_OWES)]


def fuse_heads(module: nn.Module, plan: Plan | None) -> None:
    """Let the heads that a plan names return `DeferredLogits`, in a model that is not split over `tp`. In place.

    Raises: PlanError `no-vocabulary-output`, `cannot-fuse-loss`, or of the plan.
    """
    if plan is None:
        what = "fuse_loss needs a plan that names the head, and this model has none"
        raise PlanError(Problem("no-vocabulary-output", what, fix="a plan with `lm_head: colwise(output=vocabulary)`"))
    cut = cut_of(module)
    facts = describe(module) if cut is None else cut.facts
    resolved = resolve(plan.with_options(sequence_parallel=False, loss_parallel=False, fuse_loss=True), facts, 1)
    mine = part_of(facts)
    local = resolved.restricted(mine)
    if wrong := wrong_heads(local, mine):
        raise PlanError(*wrong)
    for fqn, row in local.modules.items():
        head = mine.objects[fqn]
        if row.contract.compute == DEFERRED and head._parameters.get("weight") is not None:
            head.__dict__["forward"] = MethodType(_plain_head, head)
            mark_deferred(head)


def _plain_head(self: Any, input: T) -> T:
    return _deferred(self, input, self.weight, self.bias, Vocabulary(self.weight.shape[0], _ALONE), False)


def _deferred(module: Any, input: T, weight: T, bias: T | None, vocabulary: Vocabulary, sharded: bool) -> T:
    hidden, cast, bias = autocast_inputs(input, weight, bias)
    head = Head(cast, bias, vocabulary)
    if torch.compiler.is_compiling():  # a graph has no place for what is not there yet
        return logits_of(hidden, head, sharded)
    return defer(hidden, head, sharded, (module._parameters["weight"], *module.__dict__.get(_WRITTEN, ())))


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


_ALONE = Group.alone()
