"""Shards that `fully_shard` makes of tensors that are stored by a layout: of the same class, as are their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.layout_tensor.layout_dtensor import with_layout
from parallelize.state.records import applied


def restore_layouts(root: nn.Module, *_: Any) -> None:
    """After `fully_shard`: let its sharded parameters show the layout of the plan, along tp, to PyTorch. No communication.

    `fully_shard` makes plain DTensors of them. `shard_data(zero=3)` calls this. After a `fully_shard` of the user it is
    called by the model's next forward, `state_dict()` or `load_state_dict()`.
    """
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            private.convert_sharded(unit, _conversion_of)


def _conversion_of(owner: nn.Module, key: str) -> Callable[[Any], Any] | None:
    row = applied(owner).state_rows.get(key)
    return None if row is None or row.layout.is_canonical else partial(with_layout, layout=row.layout)


def reshard_units(module: nn.Module) -> None:
    """Under `fully_shard`, reshard the parameters that are still gathered after a forward."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def watch_fully_shard(root: nn.Module) -> None:
    """Call `restore_layouts` before forwards and state dicts of a model that has such parameters."""
    if any(not row.layout.is_canonical for module in root.modules() for row in applied(module).state_rows.values()):
        root.register_forward_pre_hook(_Restore())
        root.register_state_dict_pre_hook(restore_layouts)


class _Restore:
    """A pre-forward hook: looks for units of `fully_shard` when the root's class changes, which is what it does to it."""

    def __init__(self) -> None:
        self.seen: type | None = None

    def __call__(self, root: nn.Module, _: Any) -> None:
        if type(root) is not self.seen:
            self.seen = type(root)
            restore_layouts(root)
