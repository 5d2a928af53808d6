"""Writes to planned parameters, by an optimizer or by `.data = values`: to the shard, and counted, as autograd counts
them.

Autograd raises an error in backward if a tensor that forward saved was written to since; it compares version counters.
A planned forward saves the local tensor of a parameter, and an optimizer that writes to the DTensor changes the counter
of the DTensor alone. So the counters of local tensors are changed after each step of any optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import mark_of


def count_optimizer_writes() -> None:
    """Watch the steps of all optimizers of this process."""
    patches.hook("hook after optimizer steps", register_optimizer_step_post_hook, _count_writes)


def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    written = [
        private.local_of(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, DTensor) and mark_of(parameter).own
    ]
    if written:
        torch.autograd.graph.increment_version(written)


def writes_to(tensor: torch.Tensor) -> int:
    """The write counter of a tensor, or of a DTensor and its local tensor. It only grows."""
    return sum(part._version for part in (tensor, private.plain_local(tensor)) if not part.is_inference())


# -- data assignments ------------------------------------------------------------------------------------------------
# `parameter.data = values` for planned parameters, as code written for plain parameters does it. For a DTensor
# PyTorch (2.11 to 2.15) replaces an outer tensor that nothing computes with, and leaves the shard as it is, without
# an error. While planned models live, values of the same dtype and device are written to the shard.


_STOCK: Any = torch.Tensor.data


def follow_data_assignments() -> None:
    """Let `.data = ...` of a DTensor write to its shard, where PyTorch does not."""
    if "data" not in vars(DTensor):
        patches.change(DTensor, "data", lambda: property(_STOCK.__get__, _assign), _assign)


def _assign(tensor: DTensor, value: Any) -> None:
    is_alike = isinstance(value, DTensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
    if not is_alike or value.device != tensor.device:
        _STOCK.__set__(tensor, value)
        return
    with torch.no_grad():
        tensor.detach().copy_(value)
