"""Writing a distribution, or a full tensor, into the pieces that a rank holds."""

from __future__ import annotations

import math

import torch

from parallelize.layout import SlicePair
from parallelize.pieces import Stored
from parallelize.randomness.counter import Key, Run, blocks
from parallelize.randomness.distributions import Distribution
from parallelize.randomness.recipes import Box


def draw_into(stored: Stored, box: Box, distribution: Distribution, where: Key) -> None:
    """Draw this rank's elements of a box of the full tensor: element i of the whole gets number i of the key."""
    for piece in stored.pieces:
        local, full = _meet(piece, box)
        if all(part.stop > part.start for part in full):
            _draw(stored.local[local], stored.shape, tuple(part.start for part in full), distribution, where)


def _draw(out: torch.Tensor, shape: tuple[int, ...], start: tuple[int, ...], drawn: Distribution, where: Key) -> None:
    """Fill `out`, a block of a tensor of this shape that begins at `start`."""
    whole = out.ndim  # the dims from here on are whole, so that runs go through them
    while whole > 0 and out.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    run_dim = max(whole - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = torch.zeros(1, dtype=torch.int64, device=out.device)
    for dim in range(run_dim):
        along = torch.arange(start[dim], start[dim] + out.shape[dim], device=out.device) * strides[dim]
        offsets = (offsets[:, None] + along).flatten()
    if not out.is_contiguous() and run_dim > 1:  # several cut dims: its rows are no view
        scratch = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _draw(scratch, shape, start, drawn, where)
        out.copy_(scratch)
        return
    flat = out.view(len(offsets), -1)
    first = start[run_dim] * strides[run_dim] if shape else 0
    for block, index in blocks(offsets, [Run(0, first, flat.shape[1])]):
        values = drawn.draw(where, index)
        if out.dtype in (torch.float16, torch.bfloat16):
            values = values.to(torch.float32)  # as CPU and CUDA both round float64 to them
        flat[block.rows, block.columns] = values.to(out.dtype)


def copy_into(stored: Stored, full: torch.Tensor) -> None:
    """Copy this rank's elements of a full tensor."""
    for piece in stored.pieces:
        stored.local[piece.local] = full[piece.full].to(device=stored.local.device, dtype=stored.local.dtype)


def clear_padding(stored: Stored) -> None:
    """Zero what the stored shard holds beside its pieces."""
    held = sum(math.prod(part.stop - part.start for part in piece.local) for piece in stored.pieces)
    if held < stored.local.numel():
        stored.local.zero_()


def _meet(piece: SlicePair, box: Box) -> tuple[Box, Box]:
    local, full = [], []
    for here, there, wanted in zip(piece.local, piece.full, box, strict=True):
        a, b = max(there.start, wanted.start), min(there.stop, wanted.stop)
        b = max(a, b)
        local.append(slice(here.start + a - there.start, here.start + b - there.start))
        full.append(slice(a, b))
    return tuple(local), tuple(full)
