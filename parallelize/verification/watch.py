"""What every module took and gave on one rank, in the order of its calls, and which module was running when it failed.

It is looked at only when numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.deferred_logits import DeferredLogits
from parallelize.errors import ParallelizeError
from parallelize.sharded_logits import ShardedLogits

T = torch.Tensor
Key = tuple[str, int, int]  # (module, microbatch of the whole batch, which of its calls there)


@dataclass
class Seen:
    """One call of one module. `entered`, `left`: places in the order of events; `left` is -1 where it never returned."""

    name: str
    microbatch: int
    call: int
    entered: int
    left: int = -1
    input: T | None = None
    output: T | None = None
    grad: T | None = None
    took: int = 0  # storage addresses: who got whose output
    gave: int = 0

    @property
    def key(self) -> Key:
        return self.name, self.microbatch, self.call


@dataclass(frozen=True)
class Raised:
    """An error in the middle, and the innermost module that was running."""

    module: str
    error: str
    slug: str = ""
    outside: str = ""  # what ran beside the model's forward and backward: clipping, the optimiser, applying the plan


@dataclass
class Trace:
    seen: list[Seen] = field(default_factory=list)
    gradients: dict[str, T] = field(default_factory=dict)  # local ones
    raised: Raised | None = None

    def by_key(self) -> dict[Key, Seen]:
        return {one.key: one for one in self.seen}

    def on_cpu(self) -> Trace:
        """As it can be sent to another rank."""
        seen = [replace(one, input=_cpu(one.input), output=_cpu(one.output), grad=_cpu(one.grad)) for one in self.seen]
        return Trace(seen, {name: grad.cpu() for name, grad in self.gradients.items()}, self.raised)


def raised(error: BaseException, module: str = "", outside: str = "") -> Raised:
    slugs = error.slugs if isinstance(error, ParallelizeError) else ()
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Raised(module, told, slugs[0] if slugs else "", outside)


class Watch:
    """Hooks on every module. `keep`: False keeps no tensors. Tell it by `during` which microbatch is run."""

    def __init__(self, module: nn.Module, keep: bool = True):
        self.module, self.keep = module, keep
        self.restart()
        for name, inner in module.named_modules():
            inner.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            inner.register_forward_hook(self._leave(name))

    def restart(self) -> None:
        """A new trace, for another batch."""
        self.trace = Trace()
        self._open: list[Seen] = []
        self._calls: dict[tuple[str, int], int] = {}
        self._microbatch = self._clock = 0
        self._held: list[T] = []  # so that no address is used twice

    @contextmanager
    def during(self, microbatch: int) -> Iterator[None]:
        """A forward of this microbatch; an error inside is written down and goes on."""
        self._microbatch, self._open = microbatch, []
        try:
            yield
        except Exception as error:
            self.note(error)
            raise

    def note(self, error: BaseException, outside: str = "") -> None:
        """The first error counts: others follow from it."""
        if self.trace.raised is None:
            where = self._open[-1].name if self._open and not outside else ""
            self.trace.raised = raised(error, where, outside)

    def _enter(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            if private.backward_id() != -1:
                return  # recomputed
            place = (name, self._microbatch)
            call = self._calls[place] = self._calls.get(place, -1) + 1
            seen = Seen(name, self._microbatch, call, self._tick())
            tensor = first_tensor((args, kwargs))
            if tensor is not None and self.keep:
                seen.input, seen.took = kept(tensor), self._address(tensor)
            self.trace.seen.append(seen)
            self._open.append(seen)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple, output: Any) -> None:
            if private.backward_id() != -1:
                return
            while self._open and self._open[-1].name != name:
                self._open.pop()  # ended by something that is no error
            if not self._open:
                return
            seen = self._open.pop()
            seen.left = self._tick()
            tensor = first_tensor(output)
            if tensor is not None and self.keep:
                seen.output, seen.gave = kept(tensor), self._address(tensor)
                if tensor.requires_grad and not isinstance(tensor, DeferredLogits):
                    tensor.register_hook(lambda grad: setattr(seen, "grad", kept(grad)))

        return hook

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _address(self, tensor: T) -> int:
        self._held.append(tensor)
        return private.storage_address(plain(tensor))


def first_tensor(value: Any) -> T | None:
    """The first of `all_tensors`."""
    return next(all_tensors(value), None)


def all_tensors(value: Any) -> Iterator[T]:
    """The tensors of numbers (not ids) in nested containers, in order."""
    if hasattr(value, "to_tuple"):  # outputs of transformers
        value = value.to_tuple()
    for leaf in private.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            yield leaf


def plain(tensor: T) -> T:
    """This rank's own numbers, whatever they are wrapped in."""
    if isinstance(tensor, ShardedLogits):
        return tensor.to_local()
    return private.local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _cpu(tensor: T | None) -> T | None:
    return None if tensor is None else tensor.cpu()


def kept(tensor: T) -> T:
    return plain(tensor).detach().clone()
