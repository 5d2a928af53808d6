"""Optimizers that step on local shards: elementwise updates need no DTensor dispatch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
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
    Raises: ModelError `not-elementwise` for one whose update mixes elements (LBFGS, Adafactor, Muon); `already-local`
        for one that was passed here before. Its `load_state_dict`, ShapeError `full-optimizer-state` for the state of
        an optimizer that steps on full parameters.
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
                    f"{key} of parameter {index} is loaded with shape {list(value.shape)}, and this rank steps on a "
                    "shard "
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


# -- offloaded state -------------------------------------------------------------------------------------------------
# Optimizer state in host memory between steps. A step moves it to the accelerator and back, some parameters at a
# time.


T = torch.Tensor
CHUNK_BYTES = 256 << 20
"""Bytes of parameters whose state is on the accelerator at once; state is a small multiple of it."""


def offload_state(optimizer: Optimizer, *, by_parameter: bool) -> Optimizer:
    """Keep the state of an optimizer in host memory between its steps, in place.

    Args:
        optimizer: before its first step or after.
        by_parameter: whether each parameter is stepped by itself, so that a step may take some at a time. Else the
            state of all is moved at once, and memory is saved between steps only.

    Returns: the same optimizer. Numbers are the same. Hooks of a step are called once.
    Raises: ModelError `state-not-offloaded` for LBFGS, whose step calls a closure again and again.
    Cost: no communication. Each step copies all state from the host and back.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        what = "LBFGS calls its closure several times in a step, with its state on the device"
        raise ModelError(Problem("state-not-offloaded", what, fix="leave out offload_state, or use AdamW"))
    step, offloaded = optimizer.step, _OffloadedState(optimizer, by_parameter)

    def offloaded_step(self: Any, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with offloaded.hooks_once():
            for chunk in offloaded.chunks():
                with offloaded.on_device(chunk):
                    step(**keywords)
        return loss

    optimizer.step = MethodType(offloaded_step, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(lambda _: offloaded.to_host(offloaded.members()))
    return optimizer


class _OffloadedState:
    """Moves the state of some parameters at a time."""

    def __init__(self, optimizer: Optimizer, by_parameter: bool):
        self._optimizer, self._by_parameter = optimizer, by_parameter

    def members(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def chunks(self) -> Iterator[list[Any]]:
        """The parameters, in their order, divided by bytes. At least one chunk, which may be empty."""
        chunk: list[Any] = []
        num_bytes = 0
        for p in self.members():
            size = private.plain_local(p).numel() * p.element_size()
            if self._by_parameter and chunk and num_bytes + size > CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(p)
            num_bytes += size
        yield chunk

    @contextmanager
    def on_device(self, chunk: list[Any]) -> Iterator[None]:
        """Inside, the optimizer has these parameters alone, and their state is on their device."""
        groups, own = self._optimizer.param_groups, [group["params"] for group in self._optimizer.param_groups]
        chosen = {id(p) for p in chunk}
        for p in chunk:
            self._move(p, _Mover(private.plain_local(p).device))
        try:
            for group, params in zip(groups, own, strict=True):
                group["params"] = [p for p in params if id(p) in chosen]
            yield
        finally:
            for group, params in zip(groups, own, strict=True):
                group["params"] = params
            self.to_host(chunk)

    def to_host(self, params: list[Any]) -> None:
        for p in params:
            self._move(p, to_host)
        local_steps: Any = getattr(self._optimizer, "_local_steps", None)
        if local_steps is not None:
            local_steps.forget()  # it refers to what was on the device

    def _move(self, param: Any, move: Callable[[T], T]) -> None:
        state = self._optimizer.state.get(param)
        if state is not None:
            for key, value in state.items():
                state[key] = _moved(value, param, move)

    @contextmanager
    def hooks_once(self) -> Iterator[None]:
        """Call the hooks of a step around all chunks, and not in each."""
        optimizer: Any = self._optimizer
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for hook in before.values():
            hook(optimizer, (optimizer,), {})
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            yield
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        for hook in after.values():
            hook(optimizer, (optimizer,), {})


class _Mover:
    """Moves to one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, value: T) -> T:
        return to_device(value, self._device)


def _moved(value: Any, param: Any, move: Callable[[T], T]) -> Any:
    """A state with its tensors moved. Single numbers, such as step counts, stay where the optimizer wants them."""
    if isinstance(value, DTensor):
        local = private.plain_local(value)
        moved = move(local)
        return value if moved is local else wrap_like(param, moved, private.spec_of(value))
    if isinstance(value, T):
        return move(value) if value.numel() > 1 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, param, move) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, param, move) for key, item in value.items()}
    return value


def to_device(value: T, device: torch.device) -> T:
    """A tensor on the device of its parameter."""
    return value.to(device)


def to_host(value: T) -> T:
    """A tensor in host memory."""
    return value.to("cpu")
