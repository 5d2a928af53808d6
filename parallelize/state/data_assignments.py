"""`parameter.data = values` for planned parameters, as code written for plain parameters does it.

For a DTensor PyTorch (2.11 to 2.15) replaces an outer tensor that nothing computes with, and leaves the shard as it is, without an
error. While planned models live, values of the same dtype and device are written to the shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.patches import active as patches

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
