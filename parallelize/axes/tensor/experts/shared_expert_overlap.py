"""Shared experts, computed while the results of the other experts return: `experts(beside=shared_experts)`.

A stock block calls its experts, then its shared experts with the same input, and adds the two. The last results travel
before the experts' forward returns, and nothing would be computed meanwhile. So that forward computes the shared
experts ahead, with the input that the block was called with, and the block's own call of them returns that output. In
backward the order is the reverse: the gradients of results travel while that of the shared experts is computed.

Source: Rajbhandari et al., DeepSpeed-MoE, arXiv:2201.05596 (an expert for all tokens beside those that are chosen).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.planned_forward import ModuleRuntime, install, installed
from parallelize.base.errors import Problem
from parallelize.ops import replay_cache
from parallelize.plan.adapters import BASE
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ModuleRow, ResolvedPlan
from parallelize.plan.styles.contract import Conversion
from parallelize.state.forward_steps import BESIDE, add_step, run_inner

T = torch.Tensor
log = logging.getLogger(__name__)

_MAX_MISSES = 3  # after so many calls in a row with another input, the module is no longer computed ahead


class ComputedAhead:
    """The output of one module in one call of its block.

    Args:
        fqn, module: the module, which the block calls with its own input after its experts.

    Attributes:
        count: the outputs that were computed ahead and taken. misses: consecutive calls of the module with another
            input.
    """

    def __init__(self, fqn: str, module: nn.Module):
        self.fqn, self.module = fqn, module
        self.input: T | None = None
        self.output: T | None = None
        self.version, self.count, self.misses = 0, 0, 0

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        """A hook before the block's forward: its input."""
        inputs = (*args, *kwargs.values())
        is_plain = len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and not inputs[0].is_inference()
        self.input = inputs[0] if is_plain and not torch.compiler.is_compiling() else None

    def leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        """A hook after the block's forward, which may have failed."""
        self.input = self.output = None

    def compute(self) -> None:
        """Compute the output, unless the call that follows may have another input."""
        # a replay decides as its forward did, whose saved results of collectives it gets in order
        if not replay_cache.remembered("computed ahead", self._is_expected):
            return
        x = self.input
        assert x is not None
        self.version = x._version
        self.output = run_inner(self.module, BESIDE, (x,), {})

    def _is_expected(self) -> bool:
        module = self.module
        has_hooks = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        return self.input is not None and not has_hooks and self.misses < _MAX_MISSES

    def take(self, args: tuple, kwargs: dict) -> T | None:
        """The output for a call of the module; None where none was computed, or the call has another input or a changed
        one."""
        x, output, self.output = self.input, self.output, None
        if x is None or output is None:
            return None
        inputs = (*args, *kwargs.values())
        if len(inputs) != 1 or inputs[0] is not x or x._version != self.version:
            self._missed()
            return None
        self.count, self.misses = self.count + 1, 0
        return output

    def _missed(self) -> None:
        """Hooks of the block, or its code, give the module another input: the stock call is right, and computing ahead
        a waste."""
        if replay_cache.in_recompute():
            return
        self.misses += 1
        if self.misses == _MAX_MISSES:
            log.warning(
                "%s is no longer computed beside the experts: its block, or a hook, calls it with another input than "
                "the block's",
                self.fqn,
            )


def compute_overlapped(model: ModelFacts, row: ModuleRow) -> None:
    """Make planned experts compute what their rule names `beside` them. Everything else of the block is planned
    already."""
    block, fqn = _block_and_name(row)
    if fqn not in model.objects:
        return
    experts, module = model.objects[row.fqn], model.objects[fqn]
    planned = installed(module)
    if planned is None:
        install(module, planned := ModuleRuntime(()))
    ahead = ComputedAhead(fqn, module)
    planned.prefetched = ahead
    add_step(module, BESIDE, _computed_ahead)
    model.objects[block].register_forward_pre_hook(ahead.enter, with_kwargs=True)
    model.objects[block].register_forward_hook(ahead.leave, always_call=True)
    planned_experts = installed(experts)
    assert planned_experts is not None
    planned_experts.prefetched = ahead


def wrong_beside(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Problems `not-beside`: experts whose block has no such module, or is called with another input than its forward
    sees."""
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
    output = self._applied.planned.prefetched.take(args, kwargs)
    return run_inner(self, BESIDE, args, kwargs) if output is None else output
