"""A record of every module call on one rank: inputs, outputs, gradients, their order, and where an error was raised.

It is read only when numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.vocabulary.logits.deferred_logits import DeferredLogits
from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits
from parallelize.base.errors import ParallelizeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.nested_tensors import floating_in

T = torch.Tensor
Key = tuple[str, int, int]  # (module, microbatch of the full batch, number of its call in that microbatch)


@dataclass
class ModuleCall:
    """One call of one module.

    Attributes:
        entered, left: when the call began and ended, as numbers of events. `left` is -1 for a call that did not return.
        input_address, output_address: addresses of the storages, by which an output is found as another call's input.
    """

    name: str
    microbatch: int
    call: int
    entered: int
    left: int = -1
    input: T | None = None
    output: T | None = None
    grad: T | None = None
    input_address: int = 0
    output_address: int = 0

    @property
    def key(self) -> Key:
        return self.name, self.microbatch, self.call


@dataclass(frozen=True)
class ErrorRecord:
    """An error that ended the step.

    Attributes:
        module: the innermost module that was running.
        outside: what was running instead of the model's forward and backward: clipping, the optimizer, applying the
            plan.
    """

    module: str
    message: str
    slug: str = ""
    outside: str = ""


@dataclass
class ModuleTrace:
    """All module calls of one step. `gradients`: local ones, by parameter."""

    calls: list[ModuleCall] = field(default_factory=list)
    gradients: dict[str, T] = field(default_factory=dict)
    error: ErrorRecord | None = None

    def by_key(self) -> dict[Key, ModuleCall]:
        return {call.key: call for call in self.calls}

    def on_cpu(self) -> ModuleTrace:
        """The trace in a form that can be sent to another rank."""
        calls = [
            replace(call, input=_cpu(call.input), output=_cpu(call.output), grad=_cpu(call.grad)) for call in self.calls
        ]
        return ModuleTrace(calls, {name: grad.cpu() for name, grad in self.gradients.items()}, self.error)


def record_error(error: BaseException, module: str = "", outside: str = "") -> ErrorRecord:
    slugs = error.slugs if isinstance(error, ParallelizeError) else ()
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ErrorRecord(module, summary, slugs[0] if slugs else "", outside)


class ModuleTracer:
    """Hooks on every module that write a trace. `microbatch` says which microbatch a forward is for.

    store_tensors: False records calls without tensors.
    """

    def __init__(self, module: nn.Module, store_tensors: bool = True):
        self.module, self.store_tensors = module, store_tensors
        self.restart()
        for name, inner in module.named_modules():
            inner.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            inner.register_forward_hook(self._leave(name))

    def restart(self) -> None:
        """Begin a new trace, for another batch."""
        self.trace = ModuleTrace()
        self._open: list[ModuleCall] = []
        self._num_calls: dict[tuple[str, int], int] = {}
        self._microbatch = self._clock = 0
        self._alive: list[T] = []  # tensors that stay allocated, so that no address is used twice

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Trace a forward of this microbatch. An error is recorded and raised again."""
        self._microbatch, self._open = index, []
        try:
            yield
        except Exception as error:
            self.record(error)
            raise

    def record(self, error: BaseException, outside: str = "") -> None:
        """Record an error, unless there is one already: later errors follow from the first."""
        if self.trace.error is None:
            module = self._open[-1].name if self._open and not outside else ""
            self.trace.error = record_error(error, module, outside)

    def _enter(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            if private.backward_id() != -1:
                return  # recomputed
            key = (name, self._microbatch)
            number = self._num_calls[key] = self._num_calls.get(key, -1) + 1
            call = ModuleCall(name, self._microbatch, number, self._tick())
            tensor = first_tensor((args, kwargs))
            if tensor is not None and self.store_tensors and (address := self._address(tensor)):
                call.input, call.input_address = local_copy(tensor), address
            self.trace.calls.append(call)
            self._open.append(call)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple, output: Any) -> None:
            if private.backward_id() != -1:
                return
            while self._open and self._open[-1].name != name:
                self._open.pop()  # a call that raised an exception which the model caught
            if not self._open:
                return
            call = self._open.pop()
            call.left = self._tick()
            tensor = first_tensor(output)
            if tensor is not None and self.store_tensors and (address := self._address(tensor)):
                call.output, call.output_address = local_copy(tensor), address
                if tensor.requires_grad and not isinstance(tensor, DeferredLogits):
                    tensor.register_hook(lambda grad: setattr(call, "grad", local_copy(grad)))

        return hook

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _address(self, tensor: T) -> int:
        """0: the tensor has no storage, and may not be stored, as inside of `vmap`."""
        self._alive.append(tensor)
        return private.storage_address(local_of(tensor))


def first_tensor(value: Any) -> T | None:
    """The first floating-point tensor in nested containers."""
    return next(floating_in(value), None)


def local_of(tensor: T) -> T:
    """This rank's part of a tensor, without any wrapper."""
    if isinstance(tensor, ShardedLogits):
        return tensor.to_local()
    return private.plain_local(tensor)


def _cpu(tensor: T | None) -> T | None:
    return None if tensor is None else tensor.cpu()


def local_copy(tensor: T) -> T:
    return local_of(tensor).detach().clone()
