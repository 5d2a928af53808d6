"""Follows the dims that are shards from tensor to tensor, and refuses an operation that needs all of one.

The unknown is allowed: a tensor whose shard dim is lost counts as full.
"""

from __future__ import annotations

import os
import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.axes.tensor.planned_forward import is_shape_error, misread_shard
from parallelize.axes.tensor.watch.child_reads import reads_parameter
from parallelize.axes.tensor.watch.shard_dims import HookedShard, ShardDim, refuse_added
from parallelize.axes.tensor.watch.shard_operations import Call, mixes, scrambles, shard_of_result
from parallelize.base.errors import ModelError, Problem
from parallelize.base.package import FOLDER
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.user_code import TORCH, frame_of_caller, place_of
from parallelize.plan.pattern import generic

T = torch.Tensor

_FACTORIES = frozenset(
    ["zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"]
)
_POSITIONS = frozenset(("arange", "linspace", "range"))
_DROPOUT = os.path.join(FOLDER, "state", "randomness", "dropout")  # its mode passes on what the model calls
_COLLECTIVES = os.path.join(TORCH, "distributed")
_MIXED = "mixed torch.Tensor and DTensor"  # what DTensor says of an operation with both


class _ShardSize(int):
    """The number of tokens in a shard, which code may take for the length of the sequence."""


class ShardFollower(TorchFunctionMode):
    """Follows shard dims through a forward, and refuses operations that need all of one."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.shards: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.derived: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.modules: list[nn.Module] = []
        self.num_opaque = 0
        self.has_tokens = False
        self.hooked = ""  # the module whose forward hooks of the user run now
        self.hooked_shards: list[HookedShard] = []  # arguments and results of such hooks

    def note(self, x: T) -> None:
        """A hook of the user has this shard."""
        self.hooked_shards.append(HookedShard(weakref.ref(x), self.shards[x].kind, self.hooked))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (self.num_opaque and not self.hooked) or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        leaves = private.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, T)]
        is_sharded = any(x in self.shards for x in tensors)
        has_size = any(_has_shard_size(leaf) for leaf in leaves)
        if not (is_sharded or has_size or any(x in self.derived for x in tensors)):
            return self._run(func, args, kwargs, tensors)
        caller = _caller()
        if caller is None or not _is_of_model(caller, self.modules):
            return func(*args, **kwargs)
        call = Call(_name_of(func), args, kwargs, self.shards.get, self._is_derived)
        self._check(call, caller)
        self._check_parameters(tensors)
        out = self._run(func, args, kwargs, tensors)
        if call.name in ("shape", "size"):
            return self._marked_size(call, out)
        self._follow(call, out)
        scrambled = scrambles(call, out) if isinstance(out, T) else None
        if scrambled is not None:
            self._refuse(call, caller, scrambled, "cut")
        return out

    def _run(self, func: Any, args: tuple, kwargs: dict, tensors: list[T]) -> Any:
        """The operation, whose error gets a name where planned parameters or shards are its cause."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            running = self.modules or [self.root]
            if _MIXED in str(error):
                names = [name for name, p in self.root.named_parameters() if any(p is x for x in tensors)]
                if names:
                    raise reads_parameter(running[-1], names[0], place_of(frame_of_caller(sys._getframe(1)))) from error
            if any(x in self.shards for x in tensors) and is_shape_error(error):
                raise misread_shard(running[-1], error) from error
            raise

    def _is_derived(self, value: Any) -> bool:
        return isinstance(value, T) and (value in self.derived or value in self.shards)

    def _check(self, call: Call, caller: FrameType) -> None:
        misuse = mixes(call)
        if misuse is not None:
            self._refuse(call, caller, *misuse)
        if self._takes_size_for_length(call):
            shard = ShardDim("sequence", 0, 1, 0, "")
            self._refuse(call, caller, shard, "count")

    def _check_parameters(self, tensors: list[T]) -> None:
        """Planned parameters are read as local tensors: a `Parameter` here is one that was added after the plan."""
        has_tokens = any(self.shards[x].kind == "sequence" for x in tensors if x in self.shards)
        if has_tokens and torch.is_grad_enabled():
            refuse_added(tensors, type(self.modules[-1]).__name__ if self.modules else "the model")

    def _takes_size_for_length(self, call: Call) -> bool:
        if call.name in _POSITIONS:
            return any(isinstance(value, _ShardSize) for value in (*call.args, *call.kwargs.values()))
        if call.name != "__getitem__" or self._is_derived(call.args[0]):
            return False
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        return any(_has_shard_size(item) for item in index if isinstance(item, slice))

    def _follow(self, call: Call, out: Any) -> None:
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(result, T):
                continue
            self.derived[result] = True
            shard = _made_by_size(call, result) if call.name in _FACTORIES else shard_of_result(call, result)
            if shard is not None:
                self.shards[result] = shard
                if self.hooked:
                    self.note(result)
            elif result in self.shards:
                del self.shards[result]

    def _marked_size(self, call: Call, out: Any) -> Any:
        x = call.args[0]
        shard = self.shards.get(x)
        if shard is None or shard.kind != "sequence" or not shard.is_whole_dim(x.shape):
            return out
        if isinstance(out, torch.Size):
            dim = shard.dim % x.ndim
            return torch.Size([*out[:dim], _ShardSize(out[dim]), *out[dim + 1 :]]) if type(out[dim]) is int else out
        (dim,) = (*call.args[1:], *call.kwargs.values())
        return _ShardSize(out) if dim % x.ndim == shard.dim % x.ndim and type(out) is int else out

    def _refuse(self, call: Call, caller: FrameType, shard: ShardDim, kind: str) -> None:
        module = type(self.modules[-1]).__name__ if self.modules else "the model"
        by = f"{call.name.strip('_')} in {module} ({place_of(frame_of_caller(caller) or caller)})"
        if shard.kind == "sequence":
            what = f"{by} needs all tokens, and a rank has a part of each sequence in the sequence-parallel region"
            if kind == "count":
                what = (
                    f"{by} counts tokens by the size of a shard: a rank has a part of each sequence in the "
                    "sequence-parallel region"
                )
            fix = "a `gather` rule for the module that needs all tokens, or sequence_parallel=False"
            raise ModelError(Problem("mixed-sequence", what, fix=fix))
        column = generic(shard.source)
        if kind == "cut":
            what = f"{by} cuts the output of {column} into parts, and a rank has a range of all of it"
            fix = "a plan whose rule shards each part: `colwise(chunks=3)`, or `colwise(heads + kv_heads + kv_heads)`"
            raise ModelError(Problem("divided-features", what, fix=fix))
        what = f"{by} works over all features of {column}, and a rank has a part"
        fix = "`replicate` for the linears of this block, or put the function after its row linear"
        raise ModelError(Problem("mixed-features", what, fix=fix))


def _has_shard_size(value: Any) -> bool:
    if isinstance(value, slice):
        return any(isinstance(limit, _ShardSize) for limit in (value.start, value.stop))
    return isinstance(value, _ShardSize) or (isinstance(value, tuple) and any(map(_has_shard_size, value)))


def _made_by_size(call: Call, out: T) -> ShardDim | None:
    """A tensor that was made as long as a shard is one too, such as ones that a forward sums to count tokens."""
    sizes = [value for value in private.tree_leaves(call.args) if isinstance(value, int)]
    for index, size in enumerate(sizes):
        if isinstance(size, _ShardSize) and index < out.ndim and len(sizes) >= out.ndim:
            return ShardDim("sequence", index - out.ndim, 1, int(size), "")
    return None


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def _caller() -> FrameType | None:
    """The innermost frame of code that is not torch's; None within a collective or conversion of
    `torch.distributed`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, _DROPOUT)):
        if frame.f_code.co_filename.startswith(_COLLECTIVES):
            return None
        frame = frame.f_back
    return frame


def _is_of_model(frame: FrameType, modules: list[nn.Module]) -> bool:
    """Whether an operation is one of the model's own code or of a stock module, rather than of a conversion at a
    boundary."""
    name = frame.f_code.co_filename
    return not name.startswith(FOLDER) or name.endswith("planned_forward.py")
