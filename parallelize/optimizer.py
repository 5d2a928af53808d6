"""Optimisers that step on local shards: elementwise updates need no DTensor dispatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem

# each element of the update depends on that element's own gradient and state alone; state tensors are updated in place
ELEMENTWISE = {
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
}


def local_optimizer(optimizer: Optimizer, *, elementwise: bool | None = None) -> Optimizer:
    """Make an optimiser's steps work on this rank's shards; everything outside a step still sees DTensors.

    Same numbers, at the cost of plain tensors (a DTensor AdamW step costs 1.7 to 4.6 times as much). State dicts,
    schedulers, closures (called once, before the step), `zero_grad` and `add_param_group` go on as before.

    Args:
        elementwise: True vouches for an optimiser that this package does not know.

    Returns: the same optimiser.
    Raises: ModelError `not-elementwise` for one whose update mixes elements (LBFGS, Adafactor, Muon),
        `already-local` for one that was given here before.
    """
    name = type(optimizer).__name__
    if not (name in ELEMENTWISE if elementwise is None else elementwise):
        raise ModelError(
            Problem(
                "not-elementwise",
                f"{name} mixes elements of a parameter, or is not known here",
                fix="let it step on DTensors, or pass elementwise=True if each element is updated by itself",
            )
        )
    if isinstance(getattr(optimizer, "_local_steps", None), _LocalSteps):
        raise ModelError(Problem("already-local", f"this {name} steps on local shards already"))
    optimizer._local_steps = _LocalSteps(rebinds=name not in ELEMENTWISE)  # type: ignore[attr-defined]
    optimizer.step = MethodType(_step, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(_forget)
    return optimizer


def _step(self: Any, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
    """The optimiser's own step, on leaves that share the shards' storage."""
    loss = None
    if closure is not None:  # it works with the model's own parameters and gradients, so before they are swapped
        with torch.enable_grad():
            loss = closure()
    with self._local_steps.swapped(self):
        type(self).step(self, **keywords)
    return loss


def _forget(optimizer: Any) -> None:
    optimizer._local_steps.forget()


class _LocalSteps:
    """Swaps DTensors for leaves during a step, and shows new state as DTensors afterwards."""

    def __init__(self, rebinds: bool):
        self.rebinds = rebinds  # state tensors may be replaced by a step, so they are wrapped again after each
        self.forget()

    def forget(self) -> None:
        """Start again from the optimiser's own state."""
        # by id, because hashing a tensor costs more than the look-up; the parameter is kept with its leaf
        self.leaves: dict[int, tuple[torch.Tensor, torch.Tensor, DTensor]] = {}
        self.state: defaultdict[torch.Tensor, dict] = defaultdict(dict)
        self.wrapped: set[int] = set()

    @contextmanager
    def swapped(self, optimizer: Optimizer) -> Iterator[None]:
        official, groups = optimizer.state, optimizer.param_groups
        kept = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [
                    self._leaf(param, official) if isinstance(param, DTensor) else self._plain(param, official)
                    for param in group["params"]
                ]
            optimizer.state = self.state
            yield
            if self.rebinds or len(self.wrapped) != len(self.state):
                self._show_state(official, groups, kept)
        finally:
            optimizer.state = official
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params
            for leaf, _, _ in self.leaves.values():
                leaf.grad = None

    def _plain(self, param: torch.Tensor, official: Any) -> torch.Tensor:
        if param in official and param not in self.state:
            self.state[param] = official[param]
        return param

    def _leaf(self, param: DTensor, official: Any) -> torch.Tensor:
        local = private.local_of(param)
        held = self.leaves.get(id(param))
        if held is None or held[1] is not local:
            if held is not None:  # moved or cast since the last step
                self.state.pop(held[0], None)
                self.wrapped.discard(id(held[0]))
            held = self.leaves[id(param)] = (torch.nn.Parameter(local, param.requires_grad), local, param)
            if param in official:
                self.state[held[0]] = {key: _unwrapped(value) for key, value in official[param].items()}
        leaf, grad = held[0], param.grad
        leaf.grad = None if grad is None else private.local_of(grad)
        return leaf

    def _show_state(self, official: Any, groups: list[dict], kept: list[list]) -> None:
        for group, params in zip(groups, kept, strict=True):
            for leaf, param in zip(group["params"], params, strict=True):
                if leaf in self.state and (self.rebinds or id(leaf) not in self.wrapped):
                    self.wrapped.add(id(leaf))
                    held = self.state[leaf]
                    same = leaf is param
                    official[param] = held if same else {k: _wrapped(v, param) for k, v in held.items()}


def _unwrapped(value: Any) -> Any:
    return private.local_of(value) if isinstance(value, DTensor) else value


def _wrapped(value: Any, param: DTensor) -> Any:
    """State shaped like the shard as a DTensor; a step count stays what it is."""
    local = private.local_of(param)
    if not isinstance(value, torch.Tensor) or value.shape != local.shape or value.ndim == 0:
        return value
    return private.wrap(value, private.with_dtype(private.spec_of(param), value))
