"""A DTensor whose layout no `Shard(dim)` describes: packed weights, and key/value heads that several ranks store.

Its local tensor is what the planned forward computes with: the slices of the layout one after another, padded where
ranks store different numbers of elements. To PyTorch it is the parameter: its shape is that of the full tensor,
`full_tensor()` returns the original order, operations compute what they would on the full tensor (`layout_operations`),
and `torch.distributed.checkpoint` writes and reads each interval at its place. Its gradients and optimizer states are
of this class too.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.autograd import Function
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate

from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.layout import Layout, SlicePair
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.layout_tensor import layout_operations
from parallelize.state.layout_tensor.kept_gradients import KeptGradient
from parallelize.state.layout_tensor.layout_shard import (
    LayoutShard,
    layout_axis,
    layout_group,
    local_pairs,
    store_like,
    unshard,
)

# -- dispatch by mode ------------------------------------------------------------------------------------------------
# torch 2.11 computes operations on subclasses of DTensor as on DTensors, without asking the class: here a mode asks
# it. Functions that Python calls with such a tensor reach `__torch_function__`, which runs them under the mode. What
# autograd calls in backward does not, so that an operation that would be differentiated is refused. Planned models
# differentiate local tensors.


class _AskTheClass(private.DispatchMode):
    def __init__(self, cls: Any):
        super().__init__()
        self.cls = cls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(type(leaf) is self.cls for leaf in private.tree_leaves((args, kwargs))):
            with private.functions_of_subclasses():
                return self.cls.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


def ask_by_mode(cls: Any) -> None:
    """Let `cls.__torch_dispatch__` see operations on tensors of a subclass of DTensor, on versions that do not call
    it."""

    def function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.no_functions_of_subclasses():
            if func in _READS:
                return func(*args, **(kwargs or {}))
            with _AskTheClass(cls):
                result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, DTensor) and leaf.grad_fn is not None for leaf in private.tree_leaves(result)):
            raise ModelError(_NOT_DIFFERENTIABLE)
        return result

    cls.__torch_function__ = classmethod(function)


_READS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "data",
        "layout",
        "is_meta",
    )
)
"""Attributes that are no operation, and `data`, whose class is the tensor's own."""

_NOT_DIFFERENTIABLE = Problem(
    "layout-gradient",
    f"an operation on a packed weight is differentiated, which torch {torch.__version__} does in the order of its "
    "shards",
    fix=(
        "use torch 2.12 or newer; or compute with parameter.full_tensor() or parameter.to_local(), which have gradients"
    ),
)


# -- layout dtensor ------------------------------------------------------------------------------------------


class LayoutDTensor(KeptGradient, DTensor):
    """A DTensor that is stored by `layout` along tp. `placements` shows a `LayoutShard` there.

    Attributes:
        tp_layout: which slices of the full tensor each rank of tp stores.
    """

    tp_layout: Layout

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return layout_operations.run(cls, func, args, kwargs or {})

    @property
    def placements(self) -> tuple[Any, ...]:
        """The placement along each axis of the mesh."""
        mesh, placements = self.device_mesh, private.spec_of(self).placements
        axis = layout_axis(mesh)
        assert axis is not None
        return (*placements[:axis], LayoutShard(self.tp_layout), *placements[axis + 1 :])

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The local tensor: the slices of the layout in memory order, with their padding. Differentiable."""
        if not torch.is_grad_enabled():
            return private.local_of(self)
        _keep_class_of_gradient(self)
        return _Local.apply(self)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The full tensor in its original order. A collective over every axis that shards it; differentiable."""
        _keep_class_of_gradient(self)
        return _FullTensor.apply(self)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False, **dtypes: Any
    ) -> DTensor:
        """A plain DTensor with these placements, through the full tensor; itself where they are its own."""
        mesh = device_mesh or self.device_mesh
        if placements is not None and tuple(placements) == self.placements:
            return self
        everywhere = [Replicate()] * self.device_mesh.ndim
        full = DTensor.from_local(self.full_tensor(), self.device_mesh, everywhere, run_check=False)
        return full.redistribute(mesh, placements, async_op=async_op, **dtypes)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"LayoutDTensor(local_tensor={private.local_of(self)}, device_mesh={self.device_mesh}, {self.placements})"
        )

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return names, _Context(context, self.tp_layout)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> LayoutDTensor:
        tensor = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return with_layout(tensor, flatten_spec.tp_layout)

    def _stable_hash_for_caching(self) -> str:
        return f"{super()._stable_hash_for_caching()} {self.tp_layout}"

    # -- what torch.distributed.checkpoint asks for --------------------------------------------------------------------

    def _pairs(self) -> list[SlicePair]:
        rank = layout_group(self.device_mesh).rank
        return [pair for pair, _ in local_pairs(self, self.tp_layout, rank)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where each interval of this rank is in the full tensor."""
        return [_chunk(pair) for pair in self._pairs()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """An item for each interval. Intervals that several ranks store are written once: PyTorch drops equal items."""
        guard_writers()
        properties = TensorProperties.create_from_tensor(private.local_of(self))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """A view of the interval at `index.offset`.

        Raises: ValueError for an interval that this rank does not store.
        """
        for pair in self._pairs():
            if _chunk(pair).offsets == index.offset:
                return private.local_of(self).detach()[pair.local]
        raise ValueError(f"{index.fqn} has no interval at {index.offset} on this rank")


class _Context(tuple):
    """What a compiled graph rebuilds a tensor from: the context of a DTensor, whose length Dynamo checks, and the
    layout."""

    tp_layout: Layout

    def __new__(cls, context: Any, layout: Layout) -> _Context:
        self = super().__new__(cls, context)
        self.tp_layout = layout
        return self

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and getattr(other, "tp_layout", self.tp_layout) == self.tp_layout

    __hash__ = tuple.__hash__


def _chunk(pair: SlicePair) -> ChunkStorageMetadata:
    offsets, sizes = zip(*((part.start, part.stop - part.start) for part in pair.full), strict=True)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class _Local(Function):
    @staticmethod
    def forward(ctx: Any, stored: LayoutDTensor) -> torch.Tensor:
        ctx.spec, ctx.layout = private.spec_of(stored), stored.tp_layout
        local = private.local_of(stored)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> LayoutDTensor:
        return with_layout(private.wrap(grad, private.with_dtype(ctx.spec, grad)), ctx.layout)


class _FullTensor(Function):
    @staticmethod
    def forward(ctx: Any, stored: LayoutDTensor) -> torch.Tensor:
        ctx.stored = stored.detach()
        return unshard(stored, stored.tp_layout, layout_group(stored.device_mesh))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> LayoutDTensor:
        return wrap_like(ctx.stored, store_like(grad, ctx.stored.tp_layout, ctx.stored))


def _keep_class_of_gradient(stored: LayoutDTensor) -> None:
    """On torch 2.11 autograd gives a parameter a plain DTensor of its gradient's shards: put its class back."""
    if _ASKED_BY_MODE and stored.is_leaf and stored.requires_grad and not stored._post_accumulate_grad_hooks:
        stored.register_post_accumulate_grad_hook(_restore_class_of_gradient)


def _restore_class_of_gradient(stored: Any) -> None:
    if stored.grad is not None:
        stored.grad = with_layout(stored.grad, stored.tp_layout)


def with_layout(tensor: DTensor, layout: Layout | None) -> Any:
    """The same object, as a tensor that is stored by `layout`; unchanged where a plain DTensor says the same."""
    if layout is not None and not layout.is_canonical:
        tensor.__class__ = LayoutDTensor
        tensor.__dict__["tp_layout"] = layout
    return tensor


def layout_of(tensor: Any) -> Layout | None:
    """The layout of a `LayoutDTensor`; None for any other tensor."""
    return tensor.tp_layout if type(tensor) is LayoutDTensor else None


def wrap_like(like: Any, local: torch.Tensor, spec: Any = None) -> Any:
    """A local tensor as a DTensor that is stored like `like`, in the dtype of `local`.

    Args:
        spec: mesh and placements, where data axes shard `local` and not `like`. None: those of `like`.
    """
    spec = private.spec_of(like) if spec is None else spec
    return with_layout(private.wrap(local, private.with_dtype(spec, local)), layout_of(like))


private.register_foreach_class(LayoutDTensor)
_ASKED_BY_MODE = not private.asks_subclasses_of_dtensors()
if _ASKED_BY_MODE:
    ask_by_mode(LayoutDTensor)


# -- one item writers ------------------------------------------------------------------------------------------------
# Refuses what writes one item of a tensor on each rank, where a rank stores several intervals of it. The files of
# PyTorch's `HuggingFaceStorageWriter` have one tensor of a name each, so that the last interval would take the place
# of all.


@cache
def guard_writers() -> None:
    """Let the writer raise ShapeError `several-intervals` before it writes, from the first save of a `LayoutDTensor`
    on."""
    writer: Any = getattr(dcp, "HuggingFaceStorageWriter", None)  # since 2.8
    if writer is None:
        return
    stock = writer.prepare_local_plan

    def prepare_local_plan(self: Any, plan: Any) -> Any:
        _refuse(plan)
        return stock(self, plan)

    writer.prepare_local_plan = prepare_local_plan


def _refuse(plan: Any) -> None:
    items = Counter(item.index.fqn for item in plan.items)
    several = [fqn for fqn, count in items.items() if count > 1]
    if several:
        what = (
            f"this rank stores {items[several[0]]} intervals of {several[0]}, and HuggingFaceStorageWriter writes one "
            "of a name"
        )
        fix = (
            "parallelize.save_pretrained(model, folder) writes such folders; "
            "torch.distributed.checkpoint.FileSystemWriter"
        )
        raise ShapeError(Problem("several-intervals", what, fix=fix))
