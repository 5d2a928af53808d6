"""Optimizers that step on local shards: elementwise updates need no DTensor dispatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.layout_tensor.layout_dtensor import wrap_like

# the update of each element depends only on that element's gradient and state; state tensors are updated in place
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
    """Make an optimizer step on this rank's shards, as plain tensors; outside of a step everything stays a DTensor.

    The numbers are the same. A step costs as much as with plain tensors (with DTensors, AdamW takes 1.7 to 4.6 times as
    long). State dicts, schedulers, closures (called once, before the step), `zero_grad` and `add_param_group` work as
    before.

    Args:
        optimizer: whose `step` is replaced, in place.
        elementwise: True says that each element's update needs only that element, for a class that is not known here.

    Returns: the same optimizer.
    Raises: ModelError `not-elementwise` for one whose update mixes elements (LBFGS, Adafactor, Muon); `already-local` for
        one that was passed here before. Its `load_state_dict`, ShapeError `full-optimizer-state` for the state of an
        optimizer that steps on full parameters.
    Cost: no communication.
    """
    name = type(optimizer).__name__
    if not (name in ELEMENTWISE if elementwise is None else elementwise):
        what = f"{name} mixes elements of a parameter, or is not known here"
        fix = "let it step on DTensors, or pass elementwise=True if each element is updated by itself"
        raise ModelError(Problem("not-elementwise", what, fix=fix))
    if isinstance(getattr(optimizer, "_local_steps", None), _LocalSteps):
        raise ModelError(Problem("already-local", f"this {name} steps on local shards already"))
    optimizer._local_steps = _LocalSteps(rebinds=name not in ELEMENTWISE)  # type: ignore[attr-defined]
    optimizer.step = MethodType(_step, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_pre_hook(_refuse_full_state)
    optimizer.register_load_state_dict_post_hook(_forget)
    return optimizer


def _step(self: Any, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
    """The optimizer's own step, on leaves that share the shards' storage."""
    loss = None
    if closure is not None:  # called before the swap: it uses the model's own parameters and gradients
        with torch.enable_grad():
            loss = closure()
    with self._local_steps.swapped(self):
        type(self).step(self, **keywords)
    return loss


def _refuse_full_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Refuse state that is no DTensor and does not fit the shards, before anything is loaded."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, param in zip(indices, params, strict=False):
        local = private.plain_local(param)
        for key, value in state["state"].get(index, {}).items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if isinstance(param, DTensor) and is_plain and value.ndim and value.shape != local.shape:
                what = (
                    f"{key} of parameter {index} is loaded with shape {list(value.shape)}, and this rank steps on a shard "
                    f"{list(local.shape)} of [{', '.join(map(str, param.shape))}]"
                )
                fix = "save the other run with a Checkpointer, whose optimizer state is loaded on any mesh"
                raise ShapeError(Problem("full-optimizer-state", what, fix=fix))


def _forget(optimizer: Any) -> None:
    optimizer._local_steps.forget()


class _Leaf(NamedTuple):
    """The plain parameter that is stepped instead of a DTensor. `local`: the storage that it shares."""

    leaf: torch.nn.Parameter
    local: torch.Tensor
    param: DTensor


class _LocalSteps:
    """Swaps DTensors for plain leaves during a step, and wraps new state as DTensors afterwards.

    `rebinds`: a step may replace state tensors, so they are wrapped again after each.
    """

    def __init__(self, rebinds: bool):
        self.rebinds = rebinds
        self.forget()

    def forget(self) -> None:
        """Start again from the optimizer's own state."""
        # by id, because hashing a tensor costs more than the look-up; `_Leaf` keeps the parameter alive
        self.leaves: dict[int, _Leaf] = {}
        self.state: defaultdict[torch.Tensor, dict] = defaultdict(dict)
        self.wrapped: set[int] = set()
        self.published: dict[int, dict] = {}  # by id of a leaf: what the optimizer's own state was after the last step

    @contextmanager
    def swapped(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer's groups and state have plain tensors."""
        own_state, groups = optimizer.state, optimizer.param_groups
        own_params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [
                    self._leaf(param, own_state) if isinstance(param, DTensor) else self._plain(param, own_state)
                    for param in group["params"]
                ]
            optimizer.state = self.state
            yield
            if self.rebinds or len(self.wrapped) != len(self.state):
                self._wrap_state(own_state, groups, own_params)
        finally:
            optimizer.state = own_state
            for group, params in zip(groups, own_params, strict=True):
                group["params"] = params
            for entry in self.leaves.values():
                entry.leaf.grad = None

    def _plain(self, param: torch.Tensor, own_state: Any) -> torch.Tensor:
        own = own_state.get(param)
        if own is not self.state.get(param):  # loaded, cleared or replaced since the last step
            self._drop(param)
            if own is not None:
                self.state[param] = own
        return param

    def _drop(self, leaf: torch.Tensor) -> None:
        """Forget the state of a leaf."""
        self.state.pop(leaf, None)
        self.wrapped.discard(id(leaf))
        self.published.pop(id(leaf), None)

    def _take(self, leaf: torch.Tensor, own: dict | None, published: dict | None) -> None:
        """Step with the optimizer's own state, which the caller has loaded, cleared or replaced since the last step."""
        if own is None and published is None and leaf not in self.state:
            return
        self._drop(leaf)
        if own:
            self.state[leaf] = {key: _to_local(value) for key, value in own.items()}

    def _leaf(self, param: DTensor, own_state: Any) -> torch.Tensor:
        local = private.local_of(param)
        entry = self.leaves.get(id(param))
        if entry is None or entry.local is not local:
            if entry is not None:  # moved or cast since the last step
                self._drop(entry.leaf)
            entry = self.leaves[id(param)] = _Leaf(torch.nn.Parameter(local, param.requires_grad), local, param)
        leaf, grad = entry.leaf, param.grad
        own, published = own_state.get(param), self.published.get(id(leaf))
        if own is None or published is None or not _same_objects(own, published):
            self._take(leaf, own, published)
        leaf.grad = None if grad is None else private.local_of(grad)
        return leaf

    def _wrap_state(self, own_state: Any, groups: list[dict], own_params: list[list]) -> None:
        for group, params in zip(groups, own_params, strict=True):
            for leaf, param in zip(group["params"], params, strict=True):
                if leaf in self.state and (self.rebinds or id(leaf) not in self.wrapped):
                    self.wrapped.add(id(leaf))
                    state = self.state[leaf]
                    is_plain = leaf is param
                    own = state if is_plain else {k: _wrapped(v, param) for k, v in state.items()}
                    own_state[param], self.published[id(leaf)] = own, dict(own)


def _same_objects(own: dict, published: dict) -> bool:
    """Whether nothing was added, removed, moved or replaced; what was written in place is in the local tensors too."""
    # a dictionary that nobody changed has the order of the one that it was copied to
    return own.keys() == published.keys() and all(map(is_, own.values(), published.values()))


def _to_local(value: Any) -> Any:
    return private.plain_local(value)


def _wrapped(value: Any, param: DTensor) -> Any:
    """State of the shard's shape as a DTensor; other state, such as a step count, unchanged."""
    local = private.local_of(param)
    if not isinstance(value, torch.Tensor) or value.shape != local.shape or value.ndim == 0:
        return value
    return wrap_like(param, value)
