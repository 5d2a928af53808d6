"""Rules of operations that read two parts of a dim as one thing: complex numbers, gated linear units."""

from __future__ import annotations

import torch

from parallelize.plan.dims.factors import new_dim
from parallelize.plan.dims.record import Record, Slice, line_of_model

T = torch.Tensor


def complex_numbers(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """The last dim of real numbers, of size 2, is the two parts of complex ones."""
    dims = record.dims(args[0])
    real = [*dims, new_dim(2)] if name == "view_as_real" else dims
    record.mix(real[-1:], name)
    record.set(out, real if name == "view_as_real" else dims[:-1])


def gated_halves(record: Record, name: str, args: tuple, kwargs: dict, out: T) -> None:
    """The first half of a dim, times the sigmoid of the second half."""
    dims = list(record.dims(args[0]))
    dim = (args[1] if len(args) > 1 else -1) % len(dims)
    half, part = out.shape[dim], new_dim(out.shape[dim])
    line = line_of_model()
    record.slices += [Slice(dims[dim], start, start + half, part, record.module, line) for start in (0, half)]
    record.set(out, [*dims[:dim], part, *dims[dim + 1 :]])
