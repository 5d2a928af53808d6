"""Probability mass as integers, whose sums do not depend on how the vocabulary is sharded; and the search for top-p.

A token's mass is exp(z - max z) in units of 2^-bits, as an int64. Sums of integers are exact in any order, so they are equal
on all ranks and for any number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from parallelize.comm.groups import Group
from parallelize.ops.random.counter import block_size

T = torch.Tensor

_DIGIT = 4  # bits of the threshold that one reduction determines, with 2^4 sums per row
_WIDE_DIGIT = 7  # the same for weights that are sorted, whose sums are looked up
_LOG2_E, _LN2 = 1.44269504088896340736, 0.69314718055994530942
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 as a sum of two numbers; the first ends in zeros, so that its product with an exponent is exact. [fdlibm]"""


def bits_for(full: int) -> int:
    """Bits of the finest unit in which the masses of `full` tokens sum within 62 bits; at most 51, for float64."""
    return min(51, 62 - full.bit_length())


def masses(below: T, bits: int) -> T:
    """exp(below) in units of 2^-bits, for float64 numbers of at most 0; less than half a unit is 0.

    Uses only + and *, which round in the same way on any machine and at any index of a tensor; torch's exp may not. Works in
    blocks, so that temporaries stay in a core's cache.
    """
    size = block_size(below.device) // 4
    return torch.cat([_masses(block, bits) for block in below.reshape(-1).split(size)]).view(below.shape)


def _masses(below: T, bits: int) -> T:
    x = below.clamp(min=-(bits + 2) * _LN2)
    exponent = (x * _LOG2_E).round_()
    x.sub_(exponent * _LN2_HIGH).sub_(exponent * _LN2_LOW)
    series = torch.full_like(x, _EXP[0])
    for coefficient in _EXP[1:]:
        series.mul_(x).add_(coefficient)
    power = exponent.long().add_(bits + 1023).bitwise_left_shift_(52).view(torch.float64)
    return series.mul_(power).round_().long()


_EXP = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
"""1 / n!, highest n first; the argument is below 0.35, so the first omitted term is below 5e-18."""


def nucleus(weights: T, p: T, bits: int, group: Group, *, by_sorting: bool = False) -> T:
    """Mask [B, n] of the smallest set of the heaviest tokens whose mass reaches p of the total.

    Args:
        by_sorting: how the threshold is found, the same on every rank. Without a sort the host waits for counts.
    """
    find = _threshold_of_sorted if by_sorting else _threshold
    threshold, missing = find(weights, p, bits, group)
    needed = (missing + threshold - 1) // threshold  # number of tokens at the threshold, lowest ids first
    heavier, equal = weights > threshold.unsqueeze(-1), weights == threshold.unsqueeze(-1)
    local_quota = _quota(equal.sum(-1), needed, group).unsqueeze(-1)
    return heavier | (equal & (equal.cumsum(-1) <= local_quota))


def _threshold(weights: T, p: T, bits: int, group: Group) -> tuple[T, T]:
    """(t, m) [B]: the largest t such that the tokens of mass >= t reach p of the total; the mass that those above t miss.

    t is in [low, low + 2^shift), and each round determines its next digit: the masses in this interval are summed by that
    digit, over all ranks. Most tokens have digit 0; their sum is the rest of the interval's mass, so only the others are
    added up.
    """
    rows, count = len(weights), 1 << _DIGIT
    low, high, above = (weights.new_zeros(rows) for _ in range(3))
    for shift in reversed(range(0, bits + 1, _DIGIT)):
        first = shift + _DIGIT > bits
        heavy = weights >= (low + (1 << shift)).unsqueeze(-1)
        heavy = heavy if first else heavy & (weights < high.unsqueeze(-1))
        row, column = heavy.nonzero(as_tuple=True)
        mass = weights[row, column]
        digit = row * count + ((mass - low[row]) >> shift)
        sums = weights.new_zeros(rows * count).index_add_(0, digit, mass).view(rows, count)
        if first:
            sums[:, 0] = weights.sum(-1)
        if group.size > 1:
            group.all_reduce(sums)
        if first:
            inside = sums[:, 0].clone()
            target = _target_mass(inside, p)
        sums[:, 0] = inside - sums[:, 1:].sum(-1)
        reach = sums.flip(-1).cumsum(-1).flip(-1) + above.unsqueeze(-1)  # mass of a digit's tokens and all above
        chosen = (reach >= target.unsqueeze(-1)).sum(-1, keepdim=True) - 1
        inside = sums.gather(-1, chosen).squeeze(-1)
        above = reach.gather(-1, chosen).squeeze(-1) - inside
        low = low + (chosen.squeeze(-1) << shift)
        high = low + (1 << shift)
    return low, target - above


def _threshold_of_sorted(weights: T, p: T, bits: int, group: Group) -> tuple[T, T]:
    """As `_threshold`, of weights that are sorted first: each round looks up the mass from each of 2^_WIDE_DIGIT weights on."""
    ordered = weights.sort(-1).values
    # the mass from each place on, and nothing beyond the last
    reach = nn.functional.pad(ordered.flip(-1).cumsum(-1).flip(-1), (0, 1))

    def mass_from(thresholds: T) -> T:
        """The mass [B, n], over all ranks, of tokens of at least each of thresholds [B, n]."""
        mass = reach.gather(-1, torch.searchsorted(ordered, thresholds))
        if group.size > 1:
            group.all_reduce(mass)
        return mass

    low = weights.new_zeros(len(weights), 1)
    digits = torch.arange(1 << _WIDE_DIGIT, device=weights.device)
    target = _target_mass(mass_from(low), p.unsqueeze(-1) if p.ndim else p)
    for shift in reversed(range(0, bits + 1, _WIDE_DIGIT)):
        enough = mass_from(low + (digits << shift)) >= target
        low = low + ((enough.sum(-1, keepdim=True) - 1) << shift)
    return low.squeeze(-1), (target - mass_from(low + 1)).squeeze(-1)


def _target_mass(total: T, p: T) -> T:
    """p of the total mass, at least one unit."""
    return (total.double() * p).ceil_().long().clamp_(min=1).minimum(total)


def _quota(equal: T, needed: T, group: Group) -> T:
    """How many of the tokens at the threshold this rank keeps, given that lower ranks come first."""
    if group.size == 1:
        return needed
    before = group.all_gather(equal)[: group.rank].sum(0)
    return (needed - before).clamp_(min=0)
