"""Gumbel noise by counting: a function of a key, a row and a token, the same bits on any rank and machine."""

from __future__ import annotations

import torch

from parallelize.randomness.counter import Key, open_uniform
from parallelize.randomness.normal import log

T = torch.Tensor

_SURELY = 1e-6  # far more than torch's logarithms can be off


def gumbel(u: T) -> T:
    """Gumbel noise of uniform numbers, -log(-log u): float64, between -3.7 and 36.8."""
    return log(log(u).neg_()).neg_()


def highest_score(z: T, ids: T, rows: T, scale: T | None, where: Key) -> tuple[T, T]:
    """(score, place) [B] of the largest z + scale * noise in each row; of equal ones the first.

    torch's logarithms are fast, and their last bits are not the same everywhere. They say which few tokens come near the
    largest score; only for those is it computed by one that is the same everywhere.

    A score of +inf says that z has a NaN or +inf there.

    Shapes: z [B, n] float64, ids [B, n] or [1, n], rows [B], scale [B] or None for 1.
        The counter is row * 2^32 + id, so a vocabulary that is padded keeps its noise.
    """
    u = open_uniform(where, (rows << 32).unsqueeze(-1) + ids)
    rough = u.log().neg_().log_().neg_()
    rough = z + (rough if scale is None else rough.mul_(scale.unsqueeze(-1)))
    top = rough.amax(-1)
    near = rough >= (top - (_SURELY + 1e-12 * top.abs())).unsqueeze(-1)
    row, column = near.nonzero(as_tuple=True)
    noise = gumbel(u[row, column])
    exact = z[row, column] + (noise if scale is None else noise * scale[row])
    score, place = rough.fill_(-torch.inf).index_put_((row, column), exact).max(-1)
    return torch.where(top.isfinite() | (top == -torch.inf), score, torch.inf), place
