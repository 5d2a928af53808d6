"""The input conversion of column linears: a tensor that several of them read, one after another, is converted once.

q, k and v of a block without a module boundary around them are called on one tensor. Their conversions are one object, which
remembers its last input: the second and the third call get the tensor that the first one made. So one gather is sent, and,
because autograd sums the three gradients before the backward of the conversion, one reduction.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parallelize.axes.tensor.watched_dtensor import WatchedDTensor, read_by_plan
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.ops import replay_cache

T = torch.Tensor


class _Last(NamedTuple):
    """The last conversion."""

    source: weakref.ref[T]
    state: tuple[Any, ...]
    converted: T


class SharedConversion:
    """A boundary conversion that returns its last result again for the same, unchanged input.

    Args:
        convert: its result must be no view of its input, which would then live as long as this object.

    The result lives as long as that input, until another input comes, or until a recomputed unit ends. Such a unit shares
    nothing with what runs outside of it, so that its replays send what its forward did. Inference tensors have no version, so
    that a change of one could not be seen: each is converted anew. So it is in compiled graphs and in captured ones.
    """

    __slots__ = ("_last", "convert")

    def __init__(self, convert: Callable[[T], T]):
        self.convert = convert
        self._last: _Last | None = None

    def __call__(self, x: T) -> T:
        if type(x) is WatchedDTensor:
            with read_by_plan(x):
                return self(x)
        if torch.compiler.is_compiling() or x.is_inference() or _is_captured(x):
            return self.convert(x)
        last, state = self._last, self._state_of(x)
        if last is not None and last.source() is x and last.state == state:
            return last.converted
        converted = self.convert(x)
        if converted is not x:
            self._last = _Last(weakref.ref(x, self._forget), state, converted)
            replay_cache.at_exit(self._forget)  # a recomputed unit keeps its inputs alone
        return converted

    def _state_of(self, x: T) -> tuple:
        # a write to a DTensor changes its own version, and one to its local tensor that of the local tensor
        written = x._version, plain_local(x)._version
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return written, x.requires_grad, modes, replay_cache.pass_number()

    def _forget(self, _: Any = None) -> None:
        self._last = None

    def __deepcopy__(self, memo: dict) -> SharedConversion:
        return memo.setdefault(id(self), SharedConversion(copy.deepcopy(self.convert, memo)))

    def __reduce__(self):
        return SharedConversion, (self.convert,)


def _is_captured(x: T) -> bool:
    """Whether a CUDA graph is being captured: its warm-up with the same tensor is not a part of it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
