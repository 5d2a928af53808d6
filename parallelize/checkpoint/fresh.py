"""A model that lay on meta: allocated to be filled in place, and put back on meta if that fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.checkpoint.fill import clear_padding
from parallelize.checkpoint.held import Held
from parallelize.checkpoint.memory import Arena
from parallelize.meta import Rebuild, allocate
from parallelize.pieces import named_once
from parallelize.zero.apply import data_of


class Fresh:
    """What must be undone if a load fails half way: half-read weights are no weights."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.was_meta = any(parameter.is_meta for parameter in module.parameters())
        self._all_meta = all(parameter.is_meta for parameter in module.parameters())
        self._before: list[tuple[dict, dict]] = []

    def allocate(self, device: Any = None, rebuild: Rebuild | None = None) -> None:
        """Memory for parameters and buffers, on the CPU in huge pages."""
        for owner in self.module.modules():
            self._before += [(held, dict(held)) for held in (owner._parameters, owner._buffers)]
        allocate(self.module, device, rebuild)
        data = data_of(self.module)
        if data is not None and data.zero == 3:  # `fully_shard` keeps views of its own
            return
        arena = Arena()
        for _, parameter in named_once(self.module):
            _move(parameter, arena)

    def room(self, held: Held) -> torch.Tensor:
        """Where a tensor's values go: its own memory, with zeros where pieces leave a part of it out."""
        clear_padding(held.stored, held.stored.local)
        return held.stored.local

    def undo(self) -> None:
        """Back to meta, where it was there."""
        if not self._before:
            return
        for held, entries in self._before:
            held.clear()
            held.update(entries)
        # parameters that were given memory in place
        meta = [owner for owner in self.module.modules() if any(_is_real(p) for p in owner._parameters.values())]
        if self._all_meta and meta:
            self.module.to("meta")


def _is_real(parameter: Any) -> bool:
    return parameter is not None and not parameter.is_meta


def _move(parameter: Any, arena: Arena) -> None:
    """Memory of the arena in the place of what was allocated and never written to."""
    own = private.local_of(parameter) if isinstance(parameter, DTensor) else parameter
    if own.device.type != "cpu":
        return
    new = arena.take(tuple(own.shape), own.dtype)
    if isinstance(parameter, DTensor):
        private.set_local(parameter, new)
    else:
        parameter.data = new
