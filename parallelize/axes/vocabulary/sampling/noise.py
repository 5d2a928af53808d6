"""Counter-based Gumbel noise: a function of a key, a row and a token id, with the same bits on any rank, and without
waits."""

from __future__ import annotations

import torch

from parallelize.ops.random.counter import AnyKey, log, open_uniform

T = torch.Tensor

_LOG_ERROR = 1e-6  # far above the error of torch's logarithms


def gumbel(u: T) -> T:
    """Gumbel noise -log(-log u) of uniform numbers u: float64, between -3.7 and 36.8."""
    return log(log(u).neg_()).neg_()


def highest_score(z: T, ids: T, rows: T, scale: T | None, noise_key: AnyKey) -> tuple[T, T]:
    """(score, index) [B] of the largest z + scale * noise in each row; of equal scores the first.

    torch's logarithms are fast, but their last bits differ between machines. They select the few tokens close to the
    largest score (see `avoids_waits`); for these the score is computed with a logarithm that is the same everywhere.

    A score of +inf means that z has a NaN or +inf in that row.

    Shapes: z [B, n] float64, ids [B, n] or [1, n], rows [B], scale [B] or None for 1.
        The counter is row * 2^32 + id, so padding the vocabulary does not change the noise.
    """
    u = open_uniform(noise_key, (rows << 32).unsqueeze(-1) + ids)
    if avoids_waits(z.device, z.numel()):
        noise = gumbel(u)
        return _highest(z + (noise if scale is None else noise.mul_(scale.unsqueeze(-1))))
    rough = u.log().neg_().log_().neg_()
    rough = z + (rough if scale is None else rough.mul_(scale.unsqueeze(-1)))
    top = rough.amax(-1)
    near = rough >= (top - (_LOG_ERROR + 1e-12 * top.abs())).unsqueeze(-1)
    row, column = near.nonzero(as_tuple=True)
    noise = gumbel(u[row, column])
    exact = z[row, column] + (noise if scale is None else noise * scale[row])
    score, index = _highest(rough.fill_(-torch.inf).index_put_((row, column), exact))
    return torch.where(top.isfinite() | (top == -torch.inf), score, torch.inf), index


def _highest(scores: T) -> tuple[T, T]:
    score, index = scores.max(-1)
    return torch.where(score.isfinite() | (score == -torch.inf), score, torch.inf), index


# -- no waits --------------------------------------------------------------------------------------------------------
# Where more arithmetic is cheaper than to wait for a count. On a CPU the few candidates that matter are selected
# first. On a GPU the host would wait for their number, once for each selection, and a CUDA graph cannot contain that.
# There a moderate number of candidates is computed in full. The results are the same.


_MAX_CANDIDATES = 1 << 20  # float64 numbers that a GPU's kernel reads in about the time of its start


def avoids_waits(device: torch.device, count: int) -> bool:
    """Whether functions of `count` candidates on this device compute all of them instead of selecting some.

    Where ranks communicate, `count` is the same on all of them.
    """
    return device.type != "cpu" and count <= _MAX_CANDIDATES
