"""All tokens of sequences from the local tokens of each rank of `cp`, in the order of the sequence."""

from __future__ import annotations

import torch

from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops

T = torch.Tensor


def gather_tokens(x: T, group: Group, layout: SequenceLayout, dim: int, gradient: str) -> T:
    """The tokens of all ranks. x: [.., s, ..], the local tokens in `dim`, which is not negative; returns [.., S, ..].

    Args:
        gradient: of the result, as in `ops.collectives.gather`: "partial" on each rank, or "replicate".

    Cost: one all-gather of the longest rank's tokens; backward a reduce-scatter of as many, or nothing.
    """
    padded = max(layout.num_tokens(rank) for rank in range(layout.size))
    gathered = ops.gather(ops.pad_to(x, dim, padded), group, dim, padded * layout.size, gradient)
    runs = layout.gathered_runs(padded)
    if runs == ((0, padded * layout.size),):
        return gathered
    return torch.cat([gathered.narrow(dim, start, stop - start) for start, stop in runs], dim)
