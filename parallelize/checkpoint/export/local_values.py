"""The values that this rank sends, as they are now. Where they are is worked out once; memory is looked up at each export.

Nothing here keeps a model's memory alive: it may be moved to the host between two exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallelize.base.files.boxes import Box
from parallelize.base.torch_private import torch_tensors as private
from parallelize.checkpoint.hub.tensor_messages import OwnedBoxes, StridedRegion, TensorMessage
from parallelize.checkpoint.run.local_tensors import ModelOnMesh

T = torch.Tensor
Values = dict[str, T]
"""Name in the model -> local tensor."""


class LocalValues:
    """What this rank owns of a model, and where it is in its local tensors. Made of `owned`, without its values."""

    def __init__(self, on_mesh: ModelOnMesh, owned: OwnedBoxes):
        self._on_mesh = on_mesh
        self._regions: dict[str, list[tuple[Box, StridedRegion]]] = owned.regions()
        self._layouts = {name: _layout(tensor) for name, tensor in self._named()}

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Parameters by their names in the full model, and buffers."""
        for name, parameter in self._on_mesh.module.named_parameters():
            yield self._on_mesh.canonical(name), parameter
        yield from self._on_mesh.module.named_buffers()

    def current(self) -> Values | None:
        """The local tensors as they are now; None if some were replaced, resized or renamed."""
        tensors = dict(self._named())
        if {name: _layout(tensor) for name, tensor in tensors.items()} != self._layouts:
            return None
        return {name: private.plain_local(tensors[name]).detach() for name in self._regions}

    def region(self, message: TensorMessage) -> StridedRegion:
        """Where the values of a message of this rank are in its local tensor."""
        box, region = self._regions[message.name][message.number]
        return region.within(message.box, box)

    def owned(self, values: Values) -> Iterator[tuple[str, list[T]]]:
        """(name, views of all that this rank owns of the tensor)."""
        for name, boxes in self._regions.items():
            yield name, [view_of(values[name], region) for _, region in boxes]


def view_of(local: T, region: StridedRegion) -> T:
    """A region of a local tensor."""
    return region.of(local, int(local.storage_offset()))


def _layout(tensor: Any) -> tuple[Any, ...]:
    local = private.plain_local(tensor)
    return id(tensor), local.dtype, local.shape, local.stride(), getattr(tensor, "placements", None)
