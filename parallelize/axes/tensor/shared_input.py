"""One input that several column linears read, such as the input of q, k and v.

When the block is called, the outputs of all its column linears are computed together, overlapped with the communication
of the input. The block's stock forward then calls the linears one after another, and each call returns the output that
was computed ahead. The plan says which linears read the input. A linear that several forwards did not call with it is
no longer computed ahead.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from parallelize.axes.tensor.dtensor_handover import WatchedDTensor, read_by_plan
from parallelize.axes.tensor.overlap_sites import CallSite
from parallelize.axes.tensor.region import Region
from parallelize.base.layout import even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.ops import collectives as ops
from parallelize.ops import replay_cache
from parallelize.ops.matmul.overlapped_linear import OverlappedLinear
from parallelize.plan.block_formats import is_conv1d
from parallelize.state.records import applied

T = torch.Tensor

_MAX_MISSES = 3  # after so many forwards in a row without a call, a linear's output is no longer computed ahead


class _BlockCall:
    """One call of the block.

    Args:
        x: the input that the block computes with.
        outputs: those computed ahead, by index of the linear. Taken outputs are removed.
        parameters: the tensors that each output was computed with, by index.
        overlapped: whether the call was counted as overlapped.
    """

    def __init__(
        self,
        x: T | None = None,
        outputs: dict[int, T] | None = None,
        parameters: dict[int, list[T]] | None = None,
        overlapped: bool = False,
    ):
        self.x, self.outputs, self.overlapped = x, outputs or {}, overlapped
        self.computed = tuple(self.outputs)
        self.num_taken = 0
        self.state = _state(x) if outputs else ()
        compiling = torch.compiler.is_compiling()
        self.versions = {} if compiling else {index: _versions(of) for index, of in (parameters or {}).items()}


def _versions(tensors: list[T]) -> list[tuple[T, int]]:
    return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in tensors]


def _state(x: T | None) -> tuple[Any, ...]:
    """What must not change between computing an output ahead and the call of its linear, for both to be equal."""
    if x is None or torch.compiler.is_compiling():  # a graph has one state, and traces writes as new values
        return ()
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return x._version, torch.is_grad_enabled(), autocast, private.saved_tensor_hooks()


class SharedInput:
    """Computes the outputs of column linears when their shared input arrives, and returns them when they are called.

    Args:
        region: where the input is gathered along the sequence; None where it is replicated.
        dim: the dim of the sequence.
        linears: the column linears.
        widths: output features of each linear on this rank.
        max_widths: the same on the rank that has the most.

    Attributes:
        misses: for each linear, the number of consecutive forwards that did not use its output.
    """

    def __init__(
        self,
        call_site: CallSite,
        region: Region | None,
        dim: int,
        *,
        linears: list[nn.Module],
        widths: list[int],
        max_widths: list[int],
    ):
        self.call_site, self.region, self.dim = call_site, region, dim
        self.linears, self.widths, self.max_widths = linears, widths, max_widths
        self.misses = [0] * len(linears)
        self.ever_taken = False
        self.current = _BlockCall()
        self._outer_calls: list[_BlockCall] = []

    @property
    def depth(self) -> int:
        """How many calls of the block are running, one inside another."""
        return len(self._outer_calls)

    def enter(self, x: T) -> T:
        """The full input for the block. `take` returns the outputs that are computed with it."""
        self._outer_calls.append(self.current)
        self.current = _BlockCall()
        call_site = self.call_site
        gathers = self.region is not None and self.region.gathers(x, self.dim)
        sends = gathers or torch.is_grad_enabled()
        indices, weights, biases = self._expected(x) if sends else ([], [], [])
        if not indices:
            reason = "no output is computed ahead" if sends else "nothing is sent without gradients"
            call_site.count(False, f"sync: {reason}")
            full = self.region.gather(x, self.dim) if self.region is not None else ops.copy(x, call_site.group)
            self.current = _BlockCall(full)
            return full
        overlapped_before = call_site.overlapped
        op = "all_gather_linear" if gathers else "column_linear"
        features = x.shape[-1], sum(self.max_widths[index] for index in indices)
        call = OverlappedLinear(op, x, weights, biases, call_site.group, decided=call_site.algorithm, features=features)
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            outputs, full = self._compute(call, gathers)
        else:  # inference tensors have no version counter: a write to one would not be noticed
            with torch.inference_mode(False), torch.no_grad():
                outputs, full = self._compute(call, gathers)
        parameters = {index: self._parameters(index) for index in indices}
        overlapped = call_site.overlapped > overlapped_before
        self.current = _BlockCall(full, dict(zip(indices, outputs, strict=True)), parameters, overlapped)
        return full

    def _parameters(self, index: int) -> list[T]:
        """A linear's parameters as its next forward would read them, stored and local: a write changes either's
        version."""
        planned = applied(self.linears[index]).planned
        assert planned is not None
        parameters: dict[str, Any] = self.linears[index]._parameters
        slots = [slot for slot in (planned.weight, planned.bias) if slot is not None]
        return [tensor for slot in slots for tensor in (parameters[slot.key], slot.local(parameters))]

    def _compute(self, call: OverlappedLinear, gathers: bool) -> tuple[list[T], T]:
        """The outputs, and the full input for every other reader."""
        group, deferred = self.call_site.group, self.call_site.deferred
        if not gathers:
            return call.column(deferred), ops.copy(call.x, group)
        assert self.region is not None
        full = self.region.gathered_size(call.x, self.dim)
        start, stop = even_interval(full, group.size, group.rank)
        if stop - start != call.x.shape[self.dim]:
            call.x = call.x.narrow(self.dim, 0, stop - start)
        return call.gather(self.dim, full, True, deferred)

    def _expected(self, x: T) -> tuple[list[int], list[T], list[T | None]]:
        """Indices, weights and biases of the linears that are expected to read this input unchanged."""
        indices, weights, biases, sharded = [], [], [], False
        casts = torch.is_autocast_enabled(x.device.type)
        for index, linear in enumerate(self.linears):
            planned, parameters = applied(linear).planned, linear._parameters
            assert planned is not None and planned.weight is not None
            weight = planned.weight.local(parameters)
            weight = weight.t() if is_conv1d(linear) else weight
            if weight.shape != (self.widths[index], x.shape[-1]):
                sharded = True  # by a wrapper that unshards it when the linear itself is called
            elif self.misses[index] < _MAX_MISSES and (casts or weight.dtype == x.dtype):
                indices.append(index)
                weights.append(weight)
                biases.append(None if planned.bias is None else planned.bias.local(parameters))
        if sharded and not indices:
            fix = "wrap the block with fully_shard rather than each linear, or overlap=off for it"
            self.call_site.had_no_effect("its weights are still sharded when the block is called", fix)
        return indices, weights, biases

    def take(self, index: int, x: T) -> T | None:
        """The output of the linear at `index`, once; None if `x` is not the input it was computed with, unchanged."""
        current = self.current
        if x is not current.x:
            return None
        current.num_taken += 1
        return current.outputs.pop(index, None) if index in current.outputs and self._unchanged(index, x) else None

    def _unchanged(self, index: int, x: T) -> bool:
        if torch.compiler.is_compiling():
            return True
        versions = zip(_versions(self._parameters(index)), self.current.versions[index], strict=True)
        same = all(a is b and version == before for (a, version), (b, before) in versions)
        return same and self.current.state == _state(x)

    def leave(self, depth: int, failed: bool = False) -> None:
        """End the call of the block that began at this depth, and count the linears that did not read its input.

        Raises: ModelError `overlap-unused` where an algorithm was requested by name and no linear ever took its output.
        """
        ended = self.current
        while len(self._outer_calls) > depth:
            self.current = self._outer_calls.pop()
        if failed or torch.compiler.is_compiling():
            return
        self.ever_taken = self.ever_taken or ended.num_taken > 0
        for index in ended.computed:
            self.misses[index] = min(self.misses[index] + 1, _MAX_MISSES) if index in ended.outputs else 0
        if ended.computed and not ended.num_taken:
            self.call_site.overlapped -= ended.overlapped
            if not self.ever_taken:
                self.call_site.had_no_effect(
                    "none of its linears is called with its input",
                    "give the linears their own rule without `gather`, or overlap=off for this block",
                )


# -- shared conversion -----------------------------------------------------------------------------------------------
# The input conversion of column linears: a tensor that several of them read, one after another, is converted once. q,
# k and v of a block without a module boundary around them are called on one tensor. Their conversions are one object,
# which remembers its last input: the second and the third call get the tensor that the first one made. So one gather
# is sent, and, because autograd sums the three gradients before the backward of the conversion, one reduction.


class _Last(NamedTuple):
    """The last conversion."""

    source: weakref.ref[T]
    state: tuple[Any, ...]
    converted: T


class SharedConversion:
    """A boundary conversion that returns its last result again for the same, unchanged input.

    Args:
        convert: its result must be no view of its input, which would then live as long as this object.

    The result lives as long as that input, until another input comes, or until a recomputed unit ends. Such a unit
    shares nothing with what runs outside of it, so that its replays send what its forward did. Inference tensors have
    no version, so that a change of one could not be seen: each is converted anew. So it is in compiled graphs and in
    captured ones.
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

    def _state_of(self, x: T) -> tuple[Any, ...]:
        # a write to a DTensor changes its own version, and one to its local tensor that of the local tensor
        written = x._version, plain_local(x)._version
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return written, x.requires_grad, modes, replay_cache.pass_number()

    def _forget(self, _: Any = None) -> None:
        self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedConversion:
        return memo.setdefault(id(self), SharedConversion(copy.deepcopy(self.convert, memo)))

    def __reduce__(self) -> Any:
        return SharedConversion, (self.convert,)


def _is_captured(x: T) -> bool:
    """Whether a CUDA graph is being captured: its warm-up with the same tensor is not a part of it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
