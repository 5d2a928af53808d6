"""Probability mass as whole numbers, whose sums do not depend on how a vocabulary is cut; and the search for top-p.

A token's mass is exp(z - max z) in units of 2^-bits, an int64. Sums of whole numbers are exact in any order, so all ranks
and all numbers of ranks agree on them to the last bit.
"""

from __future__ import annotations

import math

import torch

from parallelize.groups import Group
from parallelize.randomness.counter import block_size

T = torch.Tensor

_DIGIT = 4  # bits of the threshold that one reduction settles, with 2^4 sums a row
_LOG2_E, _LN2 = 1.44269504088896340736, 0.69314718055994530942
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two parts, the first with zeros at its end, so that its product with an exponent is exact. [fdlibm]"""


def bits_for(full: int) -> int:
    """The finest unit in which the masses of so many tokens still sum within 62 bits; a float64 holds no more than 51."""
    return min(51, 62 - full.bit_length())


def masses(below: T, bits: int) -> T:
    """exp(below) in units of 2^-bits, for float64 numbers of at most 0; what is below half a unit is 0.

    By + and * alone, which round alike on any machine and at any place of a tensor; torch's own exp need not. Block by
    block, so that temporaries stay in a core's cache.
    """
    size = block_size(below.device) // 4
    return torch.cat([_masses(part, bits) for part in below.reshape(-1).split(size)]).view(below.shape)


def _masses(below: T, bits: int) -> T:
    x = below.clamp(min=-(bits + 2) * _LN2)
    whole = (x * _LOG2_E).round_()
    x.sub_(whole * _LN2_HIGH).sub_(whole * _LN2_LOW)
    series = torch.full_like(x, _EXP[0])
    for coefficient in _EXP[1:]:
        series.mul_(x).add_(coefficient)
    power = whole.long().add_(bits + 1023).bitwise_left_shift_(52).view(torch.float64)
    return series.mul_(power).round_().long()


_EXP = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
"""1 / n!, highest first; the argument is below 0.35, so the first term left out is below 5e-18."""


def nucleus(weights: T, p: T, bits: int, group: Group) -> T:
    """Which tokens [B, n] belong to the smallest set of the heaviest whose mass reaches p of the whole."""
    least, missing = _threshold(weights, p, bits, group)
    wanted = (missing + least - 1) // least  # so many of those at the threshold, lowest ids first
    heavier, same = weights > least.unsqueeze(-1), weights == least.unsqueeze(-1)
    here = _quota(same.sum(-1), wanted, group).unsqueeze(-1)
    return heavier | (same & (same.cumsum(-1) <= here))


def _threshold(weights: T, p: T, bits: int, group: Group) -> tuple[T, T]:
    """(t, m) [B]: the largest mass t such that tokens of mass t and more reach p of the whole; what those above t miss.

    t lies in [low, low + 2^shift), and each round finds the next digit of it: tokens in there are summed by that digit,
    over all ranks. Those of digit 0 are most, and the rest of what is inside, so only the others are looked at.
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
            need = _needed(inside, p)
        sums[:, 0] = inside - sums[:, 1:].sum(-1)
        reach = sums.flip(-1).cumsum(-1).flip(-1) + above.unsqueeze(-1)  # mass of a digit's tokens and all above
        chosen = (reach >= need.unsqueeze(-1)).sum(-1, keepdim=True) - 1
        inside = sums.gather(-1, chosen).squeeze(-1)
        above = reach.gather(-1, chosen).squeeze(-1) - inside
        low = low + (chosen.squeeze(-1) << shift)
        high = low + (1 << shift)
    return low, need - above


def _needed(total: T, p: T) -> T:
    """The mass that p of the whole asks for, at least one unit, at most all of it."""
    return (total.double() * p).ceil_().long().clamp_(min=1).minimum(total)


def _quota(equal: T, wanted: T, group: Group) -> T:
    """How many of the tokens at the threshold this rank keeps, where those of lower ranks come first."""
    if group.size == 1:
        return wanted
    before = group.all_gather(equal)[: group.rank].sum(0)
    return (wanted - before).clamp_(min=0)
