"""Planned forwards whose collectives overlap with matmuls, each bound to its module; see `overlap_sites.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.planned_forward import installed
from parallelize.state.forward_steps import OVERLAP, add_step, run_inner


def install_overlapped(module: nn.Module, forward: Callable[..., Any], overlap: Any, index: int = 0) -> None:
    """Make an installed module run `forward`, one of the forwards below, around its planned forward."""
    planned = installed(module)
    assert planned is not None
    if forward in (overlapped_column, overlapped_consumer):
        planned.enter = None  # the shared input is converted, for the plain forward too
    planned.overlap, planned.index = overlap, index
    add_step(module, OVERLAP, forward)


def overlapped_row(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    planned, parameters, input = self._applied.planned, self._parameters, _single_input(args, kwargs)
    if planned.enter is not None:
        input = planned.enter(input)
    bias = planned.bias
    return planned.overlap(input, planned.weight.local(parameters), None if bias is None else bias.local(parameters))


def overlapped_column(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A column linear that converts its own input."""
    planned, input = self._applied.planned, _single_input(args, kwargs)
    shared, depth = planned.overlap, planned.overlap.depth
    try:
        out = _take_output(self, shared.enter(input))
    except BaseException:
        shared.leave(depth, failed=True)
        raise
    shared.leave(depth)
    return out


def overlapped_consumer(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A column linear whose output was computed when its block was called."""
    return _take_output(self, _single_input(args, kwargs))


def _single_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The only input of a linear, passed by position or by any name."""
    (value,) = (*args, *kwargs.values())
    return value


def _take_output(self: Any, input: torch.Tensor) -> torch.Tensor:
    planned = self._applied.planned
    out = planned.overlap.take(planned.index, input)
    if out is None:
        return run_inner(self, OVERLAP, (input,), {})
    return out if planned.leave is None else planned.leave(out)


def overlapped_block(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A block whose column linears read one input."""
    planned = self._applied.planned
    shared, depth = planned.overlap, planned.overlap.depth
    try:
        out = run_inner(self, OVERLAP, args, kwargs)
    except BaseException:
        shared.leave(depth, failed=True)
        raise
    shared.leave(depth)
    return out
