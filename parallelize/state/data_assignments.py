"""`parameter.data = values` for planned parameters, as code written for plain parameters does it.

For a DTensor PyTorch (2.11 to 2.15) replaces an outer tensor that nothing computes with, and leaves the shard as it is, without an
error. From the first plan on, values of the same dtype and device are written to the shard.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_STOCK: Any = torch.Tensor.data


@cache
def follow_data_assignments() -> None:
    """Once in a process."""
    if "data" not in vars(DTensor):
        DTensor.data = property(_STOCK.__get__, _assign)  # type: ignore[assignment]


def _assign(tensor: DTensor, value: Any) -> None:
    is_alike = isinstance(value, DTensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
    if not is_alike or value.device != tensor.device:
        _STOCK.__set__(tensor, value)
        return
    with torch.no_grad():
        tensor.detach().copy_(value)
