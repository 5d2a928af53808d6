"""Write a distribution, or a full tensor, into the slices that a rank stores."""

from __future__ import annotations

import math

import torch

from parallelize.base.layout import SlicePair
from parallelize.ops.random.counter import IndexRun, Key, blocks
from parallelize.state.randomness.init.distributions import Distribution
from parallelize.state.randomness.init.recipes import Box
from parallelize.state.stored_slices import StoredTensor


def draw_into(stored: StoredTensor, box: Box, distribution: Distribution, key: Key) -> None:
    """Draw this rank's elements of a box of the full tensor: element i of the full tensor gets number i of the key."""
    for pair in stored.slices:
        local, full = _intersection(pair, box)
        if all(interval.stop > interval.start for interval in full):
            _draw(stored.local[local], stored.shape, tuple(interval.start for interval in full), distribution, key)


def _draw(
    out: torch.Tensor, shape: tuple[int, ...], start: tuple[int, ...], distribution: Distribution, key: Key
) -> None:
    """Fill `out`, a block of a tensor of this shape that begins at `start`."""
    split_dims = out.ndim  # dims from here on are full, so that one run covers them
    while split_dims > 0 and out.shape[split_dims - 1] == shape[split_dims - 1]:
        split_dims -= 1
    run_dim = max(split_dims - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = torch.zeros(1, dtype=torch.int64, device=out.device)
    for dim in range(run_dim):
        along = torch.arange(start[dim], start[dim] + out.shape[dim], device=out.device) * strides[dim]
        offsets = (offsets[:, None] + along).flatten()
    if not out.is_contiguous() and run_dim > 1:  # several split dims: its rows are no view
        scratch = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _draw(scratch, shape, start, distribution, key)
        out.copy_(scratch)
        return
    flat = out.view(len(offsets), -1)
    first = start[run_dim] * strides[run_dim] if shape else 0
    for block, index in blocks(offsets, [IndexRun(0, first, flat.shape[1])]):
        values = distribution.draw(key, index)
        if out.dtype in (torch.float16, torch.bfloat16):
            values = values.to(torch.float32)  # CPU and CUDA both round float64 to them by way of float32
        flat[block.rows, block.columns] = values.to(out.dtype)


def copy_into(stored: StoredTensor, full: torch.Tensor) -> None:
    """Copy this rank's elements of a full tensor."""
    for pair in stored.slices:
        stored.local[pair.local] = full[pair.full].to(device=stored.local.device, dtype=stored.local.dtype)


def clear_padding(stored: StoredTensor) -> None:
    """Zero the stored shard if it has elements outside of its slices."""
    used = sum(math.prod(interval.stop - interval.start for interval in pair.local) for pair in stored.slices)
    if used < stored.local.numel():
        stored.local.zero_()


def _intersection(pair: SlicePair, box: Box) -> tuple[Box, Box]:
    """The part of a slice that is in a box, as (local, full) slices."""
    local, full = [], []
    for local_side, full_side, box_side in zip(pair.local, pair.full, box, strict=True):
        start = max(full_side.start, box_side.start)
        stop = max(start, min(full_side.stop, box_side.stop))
        shift = local_side.start - full_side.start
        local.append(slice(start + shift, stop + shift))
        full.append(slice(start, stop))
    return tuple(local), tuple(full)
