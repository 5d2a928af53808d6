"""A model on the meta device: allocated to be filled in place, and put back on meta if loading fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.torch_private import torch_tensors as private
from parallelize.checkpoint.format.device_pieces import Arena
from parallelize.checkpoint.run.local_tensors import LocalTensor
from parallelize.plan.model_facts import named_once
from parallelize.state.meta_buffers import Rebuild, allocate
from parallelize.state.stored_slices import clear_padding


class MetaModel:
    """A model that may be on meta, and what must be undone if a load fails, because half-read weights are useless."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.was_meta = any(parameter.is_meta for parameter in module.parameters())
        self._all_meta = all(parameter.is_meta for parameter in module.parameters())
        self._before: list[tuple[dict, dict]] = []

    def allocate(self, device: Any = None, rebuild: Rebuild | None = None, *, in_arena: bool = True) -> None:
        """Allocate parameters and buffers; on the CPU in huge pages. in_arena=False: the caller chooses the memory of
        parameters."""
        for owner in self.module.modules():
            self._before += [(entries, dict(entries)) for entries in (owner._parameters, owner._buffers)]
        allocate(self.module, device, rebuild)
        data = data_of(self.module)
        if not in_arena or (data is not None and data.zero == 3):  # `fully_shard` has views of its own
            return
        arena = Arena()
        for _, parameter in named_once(self.module):
            move_to_arena(parameter, arena)

    def cleared_local(self, tensor: LocalTensor) -> torch.Tensor:
        """The local tensor to fill, with zeros in its padding."""
        clear_padding(tensor.stored, tensor.stored.local)
        return tensor.stored.local

    def undo(self) -> None:
        """Return to the meta device what was there before."""
        if not self._before:
            return
        for entries, before in self._before:
            entries.clear()
            entries.update(before)
        # parameters that were allocated in place are the same objects
        allocated = [owner for owner in self.module.modules() if any(_is_real(p) for p in owner._parameters.values())]
        if self._all_meta and allocated:
            self.module.to("meta")


def _is_real(parameter: Any) -> bool:
    return parameter is not None and not parameter.is_meta


def move_to_arena(parameter: Any, arena: Arena) -> None:
    """Move an allocated parameter, which has not been written to, to memory of the arena, where it is on the CPU."""
    local = to_local(parameter)
    if local.device.type == "cpu":
        place(parameter, arena.take(tuple(local.shape), local.dtype))


def place(parameter: Any, local: torch.Tensor) -> None:
    """Make a tensor of the same shape and dtype the memory of an allocated parameter, or of its local tensor."""
    if isinstance(parameter, DTensor):
        private.set_local(parameter, local)
    else:
        parameter.data = local
