"""The tensors of a Hugging Face checkpoint, and which boxes of a rank's shards each of them is made of.

Every rank knows which boxes each rank owns, so all derive the same messages, in the same order, without sending
anything more.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from parallelize.base.boxes import (
    Box,
    Part,
    full_part,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
)
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format.device_pieces import code_of, torch_dtype
from parallelize.checkpoint.hub.adapter_folder import adapter_parts, stock_parts_to_save
from parallelize.checkpoint.hub.described_tensors import Owned, describe_tensors
from parallelize.checkpoint.hub.file_shards import HubTensor
from parallelize.checkpoint.hub.names import ModelTensor
from parallelize.checkpoint.hub.pretrained import fqn_of
from parallelize.checkpoint.run.local_tensors import BoxToWrite, ModelOnMesh, parameters

T = torch.Tensor


class TensorMessage(NamedTuple):
    """A box of a tensor of the model that one rank sends to each rank that needs the written tensor.

    Attributes:
        sender: the index of the rank that sends it.
        name: the name of the tensor in the model.
        number: index of the sender's owned box that contains it.
        box: a box of the tensor of the model.
        part: the part of the written tensor that contains it.
    """

    sender: int
    name: str
    number: int
    box: Box
    part: Part

    def target(self) -> Box:
        """The box of the written tensor."""
        box = list(self.part.target)
        for dim, (start, stop), source_start in zip(self.part.dims, self.box, self.part.source_start, strict=True):
            if dim is not None:
                begin = self.part.target[dim][0] + start - source_start
                box[dim] = (begin, begin + stop - start)
        return tuple(box)


class StridedRegion(NamedTuple):
    """Elements of a tensor, as `torch.as_strided` takes them. `offset`: in elements, from the first of the tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: T, start: int = 0) -> T:
        """The view. `start`: where the tensor begins, in elements of the storage."""
        return torch.as_strided(tensor, self.size, self.stride, start + self.offset)

    def within(self, box: Box, outer: Box) -> StridedRegion:
        """The region of a box inside of `outer`, which is the box of this one."""
        firsts = (start - first for (start, _), (first, _) in zip(box, outer, strict=True))
        offset = self.offset + sum(first * stride for first, stride in zip(firsts, self.stride, strict=True))
        return StridedRegion(shape_of(box), self.stride, offset)


def contiguous_region(shape: tuple[int, ...], offset: int = 0) -> StridedRegion:
    """All of a contiguous tensor, whose first element is number `offset`."""
    return StridedRegion(shape, _contiguous_strides(shape), offset)


@lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


class OwnedBoxes:
    """The boxes that this rank owns, with their values. Together, those of all ranks cover every tensor once."""

    def __init__(self, on_mesh: ModelOnMesh):
        self._on_mesh = on_mesh
        self._local = {fqn_of(tensor): tensor for tensor in parameters(on_mesh)}
        self.by_name: dict[str, list[BoxToWrite]] = {name: list(t.owned()) for name, t in self._local.items()}

    def described(self) -> dict[str, Any]:
        """What other ranks need to know: see `described_tensors.py`. Raises: CheckpointError `unsavable-dtype`."""
        return describe_tensors(self._on_mesh, self._local, self.by_name)

    def view(self, message: TensorMessage) -> T:
        """The values of a message that this rank sends: a view of its shard."""
        owned = self.by_name[message.name][message.number]
        return owned.value[slices_of(relative_to(message.box, starts(owned.box)))]

    def regions(self) -> dict[str, list[tuple[Box, StridedRegion]]]:
        """Where the values of each box are in the local tensor, which may move to other memory."""
        regions: dict[str, list[tuple[Box, StridedRegion]]] = {}
        for name, boxes in self.by_name.items():
            first = int(self._local[name].stored.local.storage_offset())
            regions[name] = [
                (o.box, StridedRegion(tuple(o.value.shape), o.value.stride(), int(o.value.storage_offset()) - first))
                for o in boxes
            ]
        return regions


class HubTensors:
    """All tensors of a checkpoint of the model, and the messages with their elements. The same on every rank.

    Args:
        module: the model. names: "hf" for those that `save_pretrained` writes; "peft" for the adapters alone; "model"
            for the model's own.
        model: all tensors of the unsharded model.
        by_rank: what each rank owns, in the order of ranks.
        dtype: the dtype of floating-point tensors, as safetensors files name it. None: that of the model.

    Raises: CheckpointError `unwritable-conversion`.
    """

    def __init__(
        self, module: Any, model: list[ModelTensor], by_rank: Sequence[Owned], dtype: str | None, names: str = "hf"
    ):
        self._dtype_code = dtype
        self._boxes: dict[str, list[tuple[int, int, Box]]] = {}
        dtypes: dict[str, str] = {}
        for rank, owned in enumerate(by_rank):
            for name, (code, boxes) in owned.items():
                dtypes.setdefault(name, code)
                boxes_of_ranks = self._boxes.setdefault(name, [])
                boxes_of_ranks += [(rank, number, box) for number, box in enumerate(boxes)]
        if names == "hf":
            saved = stock_parts_to_save(module, model)
        else:
            saved = (adapter_parts if names == "peft" else _own_parts)(model, self._boxes)
        self.by_name = {
            name: HubTensor(name, self._dtype(dtypes[parts[0].source]), shape, parts)
            for name, (shape, parts) in saved.items()
        }

    def _dtype(self, code: str) -> str:
        return self._dtype_code if self._dtype_code is not None and torch_dtype(code).is_floating_point else code

    def messages(self, tensor: HubTensor) -> list[TensorMessage]:
        """The messages with all elements of a tensor, in the same order on all ranks."""
        messages = []
        for part in tensor.parts:
            box = part.source_box(part.target)
            for rank, number, owned in self._boxes[part.source]:
                shared = intersection(box, owned)
                if shared is not None:
                    messages.append(TensorMessage(rank, part.source, number, shared, part))
        return messages


def _own_parts(model: Sequence[ModelTensor], names: Container[str]) -> dict[str, tuple[Any, tuple[Part, ...]]]:
    """Each tensor of the model, under its first name."""
    return {t.name: (tuple(t.shape), (full_part(t.name, t.shape),)) for t in model if t.name in names}


def dtype_code(dtype: torch.dtype | None) -> str | None:
    """The name that safetensors has for a dtype. Raises: CheckpointError `unsavable-dtype` for one that is not
    floating-point."""
    code = code_of(dtype) if dtype is not None else None
    if dtype is not None and (code is None or not dtype.is_floating_point):
        what = f"weights cannot be written as {dtype}"
        raise CheckpointError(Problem("unsavable-dtype", what, fix="torch.bfloat16, float16, float32 or float64"))
    return code


def as_target(value: T, part: Part) -> T:
    """A box of the source, with the dims of the target in their order."""
    if part.dims == tuple(range(len(part.target))):
        return value
    value = value.reshape([size for size, dim in zip(value.shape, part.dims, strict=True) if dim is not None])
    used = [dim for dim in part.dims if dim is not None]
    if used != sorted(used):
        value = value.permute([used.index(dim) for dim in sorted(used)])
    for dim in range(len(part.target)):
        if dim not in used:
            value = value.unsqueeze(dim)
    return value
