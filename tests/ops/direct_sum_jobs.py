"""What each rank does in the test of reduce-scatters over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops


def reduce_scatter(rank: int, dtype: torch.dtype, rows: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a sum, the terms of all ranks, and whether the argument was left as it was."""
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    terms = torch.randn(group.size, 2, rows, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = terms[rank].clone()
    out = ops.reduce_scatter(x, group, 1)
    return {"out": out, "terms": terms, "unchanged": torch.equal(x, terms[rank])}
