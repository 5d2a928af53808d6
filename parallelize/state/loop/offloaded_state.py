"""Optimizer state in host memory between steps. A step moves it to the accelerator and back, some parameters at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.layout_tensor.layout_dtensor import wrap_like

T = torch.Tensor
CHUNK_BYTES = 256 << 20
"""Bytes of parameters whose state is on the accelerator at once; state is a small multiple of it."""


def offload_state(optimizer: Optimizer, *, by_parameter: bool) -> Optimizer:
    """Keep the state of an optimizer in host memory between its steps, in place.

    Args:
        optimizer: before its first step or after.
        by_parameter: whether each parameter is stepped by itself, so that a step may take some at a time. Else the state of all is
            moved at once, and memory is saved between steps only.

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
