"""DTensors between two styles: made and gathered by one autograd Function each, with PyTorch's gradients.

A norm under `SequenceParallel` returns a DTensor, and so does `PrepareModuleInput`, because the stock forward may
compute with it. PyTorch's `from_local` and `redistribute` check and dispatch at every call. These Functions take the
spec from a table and run this package's collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops import replay_cache
from parallelize.ops.collectives import gather_dim, reduce_scatter_dim, refuse_double_backward, split_dim

T = torch.Tensor
_SPECS = "_parallelize_specs"
_MOST_SPECS = 256


def shard_as_dtensor(y: T, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor around an even shard."""
    return _AsDTensor.apply(y, _spec_of(mesh, placement, y))


def gathered_as_dtensor(shard: T, mesh: DeviceMesh, group: Group, dim: int) -> DTensor:
    """The replicated DTensor of an even shard, by one all-gather. Its gradient may be partial or replicated."""
    return _GatheredDTensor.apply(shard, mesh, group, dim)


def _spec_of(mesh: DeviceMesh, placement: Placement, local: T) -> Any:
    """The spec that PyTorch gives to a DTensor with such shards; the mesh remembers them."""
    specs: dict[tuple, Any] = mesh.__dict__.setdefault(_SPECS, {})
    key = placement, local.shape, local.stride(), local.dtype
    if key not in specs:
        if len(specs) >= _MOST_SPECS:
            specs.clear()
        like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        specs[key] = private.spec_of(DTensor.from_local(like, mesh, (placement,), run_check=False))
    return specs[key]


class _AsDTensor(Function):
    @staticmethod
    def forward(ctx: Any, local: T, spec: Any) -> DTensor:
        ctx.spec = spec
        return private.wrap(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any):
        refuse_double_backward()
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(placements=ctx.spec.placements)
        return grad.to_local(), None


class _GatheredDTensor(Function):
    @staticmethod
    def forward(ctx: Any, shard: T, mesh: DeviceMesh, group: Group, dim: int) -> DTensor:
        ctx.args = group, dim
        size = shard.shape[dim] * group.size
        full = replay_cache.run_collective("all_gather", gather_dim, shard, group, dim, size)
        return private.wrap(full, _spec_of(mesh, Replicate(), full), requires_grad=shard.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any):
        refuse_double_backward()
        group, dim = ctx.args
        placement = grad.placements[0]
        if placement.is_partial():
            local = reduce_scatter_dim(grad.to_local(), group, dim)
        elif placement.is_replicate():
            local = split_dim(grad.to_local(), group, dim)
        else:
            local = grad.redistribute(placements=(Shard(dim),)).to_local()
        return local, None, None, None


# -- watched dtensor -------------------------------------------------------------------------------------------------
# What code asks of a DTensor that a style returns or passes by default: of most, nothing that a plain tensor would
# answer otherwise. PyTorch's styles hand DTensors to the code of a model, which may compute with them. Most code
# passes them on to planned modules, some of it through functions that no reader of the forward's text would find. The
# first forward therefore notes what is asked of the DTensor. Where that is nothing but what a plain tensor answers
# alike, later forwards get a plain one, which costs no dispatch.


SHARD = frozenset(
    ("ndim", "dim", "dtype", "device", "is_cuda", "is_floating_point", "requires_grad")
    + ("__class__", "__torch_function__")  # which Python and PyTorch look up by themselves
)
"""What an even shard answers as its DTensor does."""
FULL = SHARD | {"shape", "size", "numel"}
"""What a full tensor answers as its replicated DTensor does."""


class Questions:
    """What the code of one model has asked of the DTensors of one place, in forwards with gradients and in others.

    Args:
        answered_alike: names of attributes and functions for which a plain tensor does as well.
    """

    __slots__ = ("_answered_alike", "_asked", "_needs_no_dtensor")

    def __init__(self, answered_alike: frozenset[str]):
        self._answered_alike = answered_alike
        self._asked: dict[bool, set[str]] = {}  # by whether gradients are on, as is the next
        self._needs_no_dtensor: dict[bool, bool] = {}

    def need_no_dtensor(self) -> bool:
        """Whether an earlier forward of this mode has shown that a plain tensor will do."""
        mode = torch.is_grad_enabled()
        if mode in self._asked:
            self._needs_no_dtensor[mode] = self._asked.pop(mode) <= self._answered_alike
        return self._needs_no_dtensor.get(mode, False)

    def watched(self, dtensor: DTensor) -> DTensor:
        """The same object; in the first forward of a mode, one that notes what is asked of it."""
        mode = torch.is_grad_enabled()
        if type(dtensor) is DTensor and mode not in self._needs_no_dtensor and not torch.compiler.is_compiling():
            dtensor.__dict__["asked"] = self._asked.setdefault(mode, set())
            dtensor.__class__ = WatchedDTensor
        return dtensor

    def __deepcopy__(self, memo: dict) -> Questions:
        return memo.setdefault(id(self), Questions(self._answered_alike))


class WatchedDTensor(DTensor):
    """A DTensor that notes which of its attributes are read, and which functions of torch are called with it."""

    def __getattribute__(self, name: str) -> Any:
        _asked_of(self).add(name)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name != "__get__":  # of an attribute, which is noted by its name
            for leaf in private.tree_leaves((args, kwargs)):
                if type(leaf) is WatchedDTensor:
                    _asked_of(leaf).add(name)
        with private.plain_functions():
            return func(*args, **(kwargs or {}))


def _asked_of(dtensor: WatchedDTensor) -> set[str]:
    return object.__getattribute__(dtensor, "__dict__")["asked"]


def needs_placement(x: Any, source: Placement) -> None:
    """Note that a planned module, which takes plain inputs for `source`, got a DTensor of another placement, which
    alone says so."""
    if isinstance(x, DTensor) and "asked" in x.__dict__ and x.placements != (source,):
        x.__dict__["asked"].add("placements")


@contextmanager
def read_by_plan(x: WatchedDTensor) -> Iterator[None]:
    """A block in which a planned module converts its input, which code has passed to it: nothing else is noted."""
    x.__class__ = DTensor  # type: ignore[assignment]
    try:
        yield
    finally:
        x.__class__ = WatchedDTensor
