"""A row linear whose reduction overlaps with its matmul."""

from __future__ import annotations

import torch

from parallelize.axes.tensor.overlap_sites import CallSite
from parallelize.axes.tensor.region import Region
from parallelize.ops.collectives import pad_to
from parallelize.ops.matmul.overlapped_linear import OverlappedLinear


class OverlappedRowLinear:
    """Reduces partial outputs while the matmul computes them.

    Args:
        region: where outputs are scattered along the sequence; None where they are all-reduced.
        dim: the dim of the sequence.
        transposed: the weight is stored [in, out].
        features: (input, output) features on the rank that has the most.
    """

    def __init__(
        self, call_site: CallSite, region: Region | None, dim: int, *, transposed: bool, features: tuple[int, int]
    ):
        self.call_site, self.region, self.dim = call_site, region, dim
        self.transposed, self.features = transposed, features

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = weight.t() if self.transposed else weight
        call_site, scatters = self.call_site, self.region is not None and self.region.scatters()
        op = "linear_reduce_scatter" if scatters else "linear_all_reduce"
        call = OverlappedLinear(
            op, x, [weight], bias, call_site.group, decided=call_site.algorithm, features=self.features
        )
        if not scatters:
            return call.reduce(call_site.deferred)
        out = call.scatter(self.dim, call_site.deferred)
        padded = -(-x.shape[self.dim] // call_site.group.size)  # shards inside a region are equally long on all ranks
        return out if out.shape[self.dim] == padded else pad_to(out, self.dim, padded)
