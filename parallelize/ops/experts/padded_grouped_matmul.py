"""PyTorch's grouped matmul for matrices of any width, which zeros make as wide as it takes them.

    rows x [N, in], weights [groups, in, out], offs [groups]: where the rows of each group end -> [N, out]

The op takes matrices of which each row begins at a multiple of 16 bytes: also those of its backward, which are
transposed. Zeros add nothing to a sum, and the columns that they make are cut off, so that results and gradients are
those of the op without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

T = torch.Tensor
ALIGNMENT = 16
"""The rows of the op's matrices have a multiple of so many bytes."""
_NAMES = ("grouped_mm", "_grouped_mm")
"""Of the op: in `torch.nn.functional`, and in `torch`."""


def fits(lengths: tuple[int, ...], itemsize: int) -> bool:
    """Whether the op takes matrices of which rows or columns have these numbers of elements, of `itemsize` bytes."""
    return all(length * itemsize % ALIGNMENT == 0 for length in lengths)


def padded_grouped_matmul(op: Callable, x: T, weights: T, **others: Any) -> T:
    """`op(x, weights, **others)`, [N, out], for matrices of any width.

    Cost: a copy of the weights, if their dims do not fit.
    """
    itemsize, (inputs, outputs) = weights.element_size(), weights.shape[-2:]
    more_inputs, more_outputs = (-length % (ALIGNMENT // itemsize) for length in (inputs, outputs))
    if more_inputs:
        x = F.pad(x, (0, more_inputs))
    if more_inputs or more_outputs:
        weights = F.pad(weights, (0, more_outputs, 0, more_inputs))
    out = op(x, weights, **others)
    return out.narrow(-1, 0, outputs) if more_outputs else out


class AnyWidth(TorchFunctionMode):
    """Within this mode, grouped matmuls take matrices of any width."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") in _NAMES:
            return padded_grouped_matmul(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
