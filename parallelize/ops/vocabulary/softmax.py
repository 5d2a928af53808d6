"""Softmax over a vocabulary that is sharded over ranks: one all-gather of a few values per token.

Each rank computes the softmax of its shard, or on a GPU its maximum and sum of exponentials alone. From those and other
sums of all shards, every rank computes the same statistics, and from these the gradient of its logits. Nothing here has
autograd: autograd Functions use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.comm.groups import Group
from parallelize.ops import replay_cache
from parallelize.ops.vocabulary.class_targets import Targets
from parallelize.ops.vocabulary.kernel_choice import kernels_for

T = torch.Tensor


@dataclass
class Statistics:
    """Statistics of n tokens over all ranks, [n] each, in float32 at least.

    Attributes:
        highest: the largest logit M.
        log_total: log sum exp(z - M).
        dot: sum q (z - M).
        mass: sum q.
        moment: sum exp(z - M) (z - M), if it was requested.
        local_softmax: [n, V/P], softmax within this rank's shard; may be overwritten. None if kernels compute the
            gradient.
        local_weight: the probability of this rank's shard; None for one rank, where it is 1.
    """

    highest: T
    log_total: T
    dot: T
    mass: T
    moment: T | None
    local_softmax: T | None
    local_weight: T | None

    @property
    def losses(self) -> T:
        """[n]: cross entropy."""
        return self.mass * self.log_total - self.dot

    @property
    def entropies(self) -> T:
        """[n]: lse - sum p z."""
        assert self.moment is not None
        return self.log_total - self.moment * torch.exp(-self.log_total)


@dataclass(frozen=True)
class SavedStatistics:
    """What backward needs of `Statistics`: [n] each."""

    highest: T
    log_total: T
    mass: T
    entropies: T | None = None


def statistics(z: T, targets: Targets, group: Group, *, moment: bool = False, maskable: bool = True) -> Statistics:
    """Softmax statistics of logits z [n, V/P].

    Args:
        moment: whether to compute `moment`, for entropies.
        maskable: whether all logits of a rank's shard may be -inf.

    Cost: one all-gather of 4 values per token (5 with `moment`).
    """
    work, lowest = working_dtype(z), lowest_of(working_dtype(z))
    softmax: T | None
    kernels = None if moment else kernels_for(z)
    if kernels is not None:
        (highest, total), softmax = kernels.row_totals(z, lowest), None
    elif z.shape[-1]:
        highest = z.amax(-1).to(work).clamp_(min=lowest)
        softmax = torch.softmax(z, -1, dtype=work)
        total = softmax.amax(-1).reciprocal_()
        if maskable and group.size > 1:
            masked = highest == lowest
            softmax.masked_fill_(masked.unsqueeze(-1), 0.0)
            total = total.masked_fill(masked, 0.0)
    else:  # more ranks than entries
        highest, softmax = z.new_full(z.shape[:-1], lowest, dtype=work), z.to(work)
        total = torch.zeros_like(highest)
    values = [highest, total, targets.dot(z, highest), targets.mass()]
    if moment:
        assert softmax is not None
        relative = (z - highest.unsqueeze(-1)).clamp_(min=lowest)  # so that exp(-inf) (-inf) is 0
        values.append(relative.mul_(softmax).sum(-1) * total)
    if group.size == 1:
        return Statistics(highest, total.log(), values[2], values[3], values[4] if moment else None, softmax, None)
    return _combined(values, softmax, group)


def _combined(values: list[T], softmax: T | None, group: Group) -> Statistics:
    """[n] values of each rank -> the statistics over all ranks, equal on every rank."""
    gathered = replay_cache.run_collective("all_gather", group.all_gather, torch.stack(values))
    highs, totals, dots, masses, *moments = gathered.unbind(1)
    highest = highs.amax(0)
    below = highs - highest
    scale = below.exp()
    total = (totals * scale).sum(0)
    moment = ((moments[0] + totals * below) * scale).sum(0) if moments else None
    weight = totals[group.rank] * scale[group.rank] / total
    return Statistics(highest, total.log(), (dots + masses * below).sum(0), masses.sum(0), moment, softmax, weight)


def logits_gradient(
    z: T,
    targets: Targets,
    stats: Statistics | SavedStatistics,
    scale: T,
    of_softmax: T,
    of_entropy: T | None = None,
    *,
    overwrite: bool = False,
) -> T:
    """of_softmax p - scale q + of_entropy d(entropy), with d(entropy)/dz_c = -p_c (log p_c + entropy).

    Shapes: z and the result [n, V/P], all else [n]. In float32 at least, or in z's dtype if kernels serve (see
        `kernel_choice`),
    which round it themselves.

    Args:
        overwrite: whether the result may take the place of `z`.
    """
    kernels, terms = kernels_for(z), targets.row_terms(scale)
    if kernels is not None and terms is not None and of_entropy is None:
        out = z if overwrite else torch.empty_like(z, memory_format=torch.contiguous_format)
        return kernels.row_gradients(z, out, stats.highest, stats.log_total, of_softmax, terms)
    out = _softmax_gradient(z, stats, of_softmax, of_entropy)
    targets.subtract_(out, scale)
    return out


def _softmax_gradient(z: T, stats: Statistics | SavedStatistics, of_softmax: T, of_entropy: T | None) -> T:
    """The gradient's part that does not depend on targets."""
    if isinstance(stats, Statistics) and stats.local_softmax is not None and of_entropy is None:
        factor = of_softmax if stats.local_weight is None else of_softmax * stats.local_weight
        return stats.local_softmax.mul_(factor.unsqueeze(-1))
    log_p = (z - stats.highest.unsqueeze(-1)).sub_(stats.log_total.unsqueeze(-1))
    if of_entropy is None:
        return log_p.exp_().mul_(of_softmax.unsqueeze(-1))
    assert stats.entropies is not None
    p = log_p.exp()
    constant = of_softmax - of_entropy * stats.entropies
    log_p.masked_fill_(p == 0.0, 0.0)  # 0 log 0 is 0, whatever the output gradient is
    return log_p.mul_(-of_entropy.unsqueeze(-1)).add_(constant.unsqueeze(-1)).mul_(p)


def working_dtype(x: T) -> torch.dtype:
    """float32 at least."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def temperature_scaled(z: T, temperature: float | T) -> T:
    """z / temperature, in float32 at least: a quotient in half precision would be rounded before the softmax.

    Shapes: z [..., V]; temperature one number, or one for each row [...].
    """
    z = z.to(working_dtype(z))
    if isinstance(temperature, T):
        temperature = temperature.to(z.dtype).unsqueeze(-1)
    return z / temperature


def lowest_of(dtype: torch.dtype) -> float:
    """Replaces minus infinity where another number is subtracted and the result must be finite."""
    return torch.finfo(dtype).min / 2
