"""Experts of any width: where a rank's part of an expert is one that grouped matmuls refuse, they are padded by zeros.

The width of an expert divided by ranks need not be a multiple of 16 bytes, though that of the unsharded model is. Experts whose widths
are multiples of eight elements run as they are, in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.planned_forward import ModuleRuntime
from parallelize.base.layout import Layout
from parallelize.ops.experts.padded_grouped_matmul import AnyWidth, fits

STACKED = 3
"""Dims of the weights of stacked experts: [experts, ., .]."""
_SMALLEST_ITEM = 2
"""Bytes of an element of the dtypes that grouped matmuls take, at least."""


def allow_any_width(module: nn.Module, planned: ModuleRuntime, layouts: Sequence[Layout]) -> None:
    """Let stacked experts run padded where a rank's part of their weights needs that in some dtype.

    Args:
        module: the experts. planned: what they run; its stock forward is replaced.
        layouts: of their parameters.
    """
    if planned.stock is None and widths_that_need(layouts, _SMALLEST_ITEM):
        planned.stock = MethodType(_at_any_width, module)


def widths_that_need(layouts: Sequence[Layout], itemsize: int) -> list[int]:
    """Widths of a rank's part of stacked weights that grouped matmuls refuse, in elements of `itemsize` bytes, each once."""
    stacked = [layout for layout in layouts if len(layout.shape) == STACKED]
    widths = {width for layout in stacked for rank in range(layout.num_ranks) for width in layout.local_shape(rank)[1:]}
    return sorted(width for width in widths if not fits((width,), itemsize))


def _at_any_width(self: Any, *args: Any, **kwargs: Any) -> Any:
    weights = (getattr(self, key) for key in self._parameters)
    stacked = [weight for weight in weights if isinstance(weight, torch.Tensor) and weight.ndim == STACKED]
    if all(fits((*weight.shape[1:], *_steps(weight)), weight.element_size()) for weight in stacked):
        return type(self).forward(self, *args, **kwargs)
    with AnyWidth():
        return type(self).forward(self, *args, **kwargs)


def _steps(weight: torch.Tensor) -> list[int]:
    """The strides of a weight between its rows or columns."""
    return [step for step in weight.stride()[1:] if step != 1]
