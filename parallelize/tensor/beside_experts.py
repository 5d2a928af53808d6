"""Shared experts, computed while the results of the other experts return: `experts(beside=shared_experts)`.

A stock block calls its experts, then its shared experts with the same input, and adds the two. The last results travel before the
experts' forward returns, and nothing would be computed meanwhile. So that forward computes the shared experts ahead, with the
input that the block was called with, and the block's own call of them returns that output. In backward the order is the reverse:
the gradients of results travel while that of the shared experts is computed.

Source: Rajbhandari et al., DeepSpeed-MoE, arXiv:2201.05596 (an expert for all tokens beside those that are chosen).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, Problem
from parallelize.plan.adapters import BASE
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.rows import ModuleRow
from parallelize.styles.contract import Conversion
from parallelize.tensor.planned_forward import Planned, install, installed

T = torch.Tensor


class ComputedAhead:
    """The output of one module in one call of its block.

    Args:
        fqn, module: the module, which the block calls with its own input after its experts.

    Attributes:
        count: the outputs that were computed ahead and taken.
    """

    def __init__(self, fqn: str, module: nn.Module):
        self.fqn, self.module = fqn, module
        self.input: T | None = None
        self.output: T | None = None
        self.version, self.count = 0, 0

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        """A hook before the block's forward: its input."""
        inputs = (*args, *kwargs.values())
        is_plain = len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and not inputs[0].is_inference()
        self.input = inputs[0] if is_plain and not torch.compiler.is_compiling() else None

    def leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        """A hook after the block's forward, which may have failed."""
        self.input = self.output = None

    def compute(self) -> None:
        """Compute the output, unless hooks may change the input of the call that follows."""
        x, planned = self.input, installed(self.module)
        if x is None or self.module._forward_pre_hooks:
            return
        assert planned is not None
        self.version = x._version
        self.output = planned.plain(self.module, x)

    def take(self, args: tuple, kwargs: dict) -> T | None:
        """The output for a call of the module; None where none was computed, or the input was written to since.

        Raises: ModelError `not-beside` where the call has another input.
        """
        x, output, inputs = self.input, self.output, (*args, *kwargs.values())
        if x is None or self.module._forward_pre_hooks:  # called outside of its block, or with what hooks have made
            return None
        self.output = None
        if len(inputs) != 1 or inputs[0] is not x:
            what = (
                f"{self.fqn} is planned beside the experts, and its block does not call it with the block's own input"
            )
            raise ModelError(Problem("not-beside", what, fix="leave `beside` out of the rule of the experts"))
        if output is None or x._version != self.version:
            return None
        self.count += 1
        return output


def compute_beside(model: ModelFacts, row: ModuleRow) -> None:
    """Make planned experts compute what their rule names `beside` them. Everything else of the block is planned already."""
    block, fqn = _block_and_name(row)
    if fqn not in model.objects:
        return
    experts, module = model.objects[row.fqn], model.objects[fqn]
    planned = installed(module)
    if planned is None:
        install(module, planned := Planned((), module.__dict__.get("forward")))
    ahead = ComputedAhead(fqn, module)
    planned.ahead, planned.plain = ahead, module.__dict__["forward"].__func__
    module.__dict__["forward"] = MethodType(_computed_ahead, module)
    model.objects[block].register_forward_pre_hook(ahead.enter, with_kwargs=True)
    model.objects[block].register_forward_hook(ahead.leave, always_call=True)
    planned_experts = installed(experts)
    assert planned_experts is not None
    planned_experts.ahead = ahead


def wrong_beside(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Problems `not-beside`: experts whose block has no such module, or is called with another input than its forward sees."""
    for row in resolved.modules.values():
        name = row.contract.beside
        block, fqn = _block_and_name(row)
        if name and not name.endswith("?") and fqn not in model.objects:
            what = f"{row.fqn}: its block has no {name} to compute beside the experts"
            yield Problem("not-beside", what, row.rule.where, fix=f"`beside={name}?` where only some blocks have it")
        outer = resolved.modules.get(block)
        if name and fqn in model.objects and outer is not None and outer.contract.enter is not Conversion.NONE:
            what = f"{row.fqn}: the plan converts the input of {block}, so that {fqn} is called with another"
            yield Problem("not-beside", what, row.rule.where, fix="leave `beside` out of the rule of the experts")


def _block_and_name(row: ModuleRow) -> tuple[str, str]:
    """The names of the block of these experts, which may have adapters, and of what is computed beside them."""
    fqn = row.fqn
    while fqn.endswith(f".{BASE}"):
        fqn = fqn.removesuffix(f".{BASE}")
    block = fqn.rpartition(".")[0]
    name = row.contract.beside.removesuffix("?")
    return block, f"{block}.{name}" if block else name


def _computed_ahead(self: Any, *args: Any, **kwargs: Any) -> Any:
    planned = self._applied.planned
    output = planned.ahead.take(args, kwargs)
    return planned.plain(self, *args, **kwargs) if output is None else output
