"""The tokens that may still be drawn, and the filters (top-k, top-p, min-p) that remove some of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.vocabulary.sampling.noise import avoids_waits
from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops.random.counter import block_size, log
from parallelize.ops.vocabulary.class_targets import Vocabulary

T = torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """This rank's candidate tokens for B rows; the ranks of `group` have the others.

    Args:
        logits: [B, n], -inf for a removed token.
        ids: [B, n] or [1, n], increasing along a row and over the ranks. The first of equal logits has the lowest id.
        full: number of candidates over all ranks.
        max_local: the largest n of any rank.
        group: the tp group.
        filtered: whether tokens were removed.
    """

    logits: T
    ids: T
    full: int
    max_local: int
    group: Group
    filtered: bool = False

    @staticmethod
    def of(local: T, vocabulary: Vocabulary) -> Candidates:
        ids = torch.arange(vocabulary.start, vocabulary.stop, device=local.device).unsqueeze(0)
        max_local = -(-vocabulary.full // vocabulary.group.size)
        return Candidates(local, ids, vocabulary.full, max_local, vocabulary.group)

    def temperature_scaled(self, temperature: T) -> Candidates:
        """Logits in float64, divided by one temperature or one per row; rows with temperature 0 are not divided."""
        divisor = torch.where(temperature == 0.0, 1.0, temperature)
        return replace(self, logits=self.logits.double() / (divisor.unsqueeze(-1) if divisor.ndim else divisor))

    @property
    def avoids_waits(self) -> bool:
        """The same on every rank of the group."""
        return avoids_waits(self.logits.device, len(self.logits) * self.max_local)

    def worst(self) -> tuple[T, T]:
        """(score, token) [B] that lose against every candidate."""
        rows = len(self.logits)
        score = torch.full((rows,), -torch.inf, dtype=torch.float64, device=self.logits.device)
        return score, torch.full((rows,), self.full, device=self.logits.device)

    def packed(self) -> Candidates:
        """The candidates without most of the removed tokens, so that no noise is drawn for them."""
        if not self.filtered or not self.logits.shape[1] or self.avoids_waits:
            return self
        width = max(1, int((self.logits > -torch.inf).sum(-1).max()))
        index = _highest(self.logits, width)
        return replace(
            self, logits=self.logits.gather(1, index), ids=self.ids.expand(self.logits.shape).gather(1, index)
        )

    def highest(self) -> T:
        """The highest logit [B] of each row over all ranks, as float64. Raises: ShapeError `bad-logits`."""
        values = self.logits.amax(-1).double() if self.logits.shape[1] else self.worst()[0]
        values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if self.group.size > 1:
            self.group.all_reduce(values, dist.ReduceOp.MAX)
        check_highest(values)
        return values

    def gathered_best(self, score: T, token: T) -> tuple[T, T]:
        """The best of all ranks' (score, token) [B]. Of equal scores the first rank wins: its token ids are lower."""
        if self.group.size == 1:
            return score, token
        pairs = self.group.all_gather(torch.stack((score.view(torch.int64), token)))
        scores, tokens = pairs[:, 0].view(torch.float64), pairs[:, 1]
        best = scores.argmax(0, keepdim=True)
        return scores.gather(0, best).squeeze(0), tokens.gather(0, best).squeeze(0)


def check_highest(values: T) -> None:
    """Raises: ShapeError `bad-logits` if a row's highest logit is not finite (on an accelerator, a device
    assertion)."""
    if values.device.type != "cpu":
        torch._assert_async(values.isfinite().all())
    elif not values.isfinite().all():
        row = int((~values.isfinite()).nonzero()[0])
        what = f"row {row} of {len(values)} has a NaN or +inf among its logits, or only -inf"
        raise ShapeError(Problem("bad-logits", what, fix="look for an overflow before the head, or a fully masked row"))


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    """The k highest logits of each row, gathered on every rank; of equal logits the lowest ids.

    Cost: one all-gather of min(k, V/P) pairs of 16 bytes per row and rank.
    """
    if k == 0 or k >= candidates.full:
        return candidates
    count = min(k, candidates.max_local)
    logits = candidates.logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    index = _highest(logits, count)
    logits, ids = logits.gather(1, index).double(), candidates.ids.expand(logits.shape).gather(1, index)
    if candidates.group.size > 1:
        padding = (0, count - index.shape[1])
        logits = torch.nn.functional.pad(logits, padding, value=-torch.inf)
        ids = torch.nn.functional.pad(ids, padding, value=candidates.full)
        pairs = candidates.group.all_gather(torch.stack((logits.view(torch.int64), ids)))
        logits, ids = pairs.permute(1, 2, 0, 3).flatten(2)
        logits = logits.contiguous().view(torch.float64)
        index = _highest(logits, k)
        logits, ids = logits.gather(1, index), ids.gather(1, index)
    return Candidates(logits, ids, k, k, Group.alone())


def _highest(logits: T, k: int) -> T:
    """Indices [B, k] of the k highest of each row, in the order of the row; the first of equal values win."""
    rows, width = logits.shape
    if k >= width:
        return torch.arange(width, device=logits.device).expand(rows, width)
    threshold = logits.topk(k).values[:, -1:]
    above, equal = logits > threshold, logits == threshold
    remaining = k - above.sum(-1, keepdim=True)
    selected = above | (equal & (equal.cumsum(-1) <= remaining))
    return selected.nonzero_static(size=rows * k)[:, 1].view(rows, k)


def keep_top_p(candidates: Candidates, p: T) -> Candidates:
    """The smallest set of the highest logits whose mass reaches p of the total; of equal logits the lowest ids.

    Cost, per row: a maximum of one value, at most 13 reductions of 16 values (without waits 10 of 128), an all-gather
        of one value.
    """
    weights = masses(candidates.logits - candidates.highest().unsqueeze(-1), bits_for(candidates.full))
    selected = nucleus(weights, p, bits_for(candidates.full), candidates.group, by_sorting=candidates.avoids_waits)
    return replace(candidates, logits=candidates.logits.masked_fill(~selected, -torch.inf), filtered=True)


def keep_min_p(candidates: Candidates, min_p: T) -> Candidates:
    """The tokens at least `min_p` times as probable as the most probable one. Cost: a maximum of one value per row."""
    threshold = candidates.highest() + torch.where(min_p > 0.0, log(min_p.clamp(min=1e-300)), -torch.inf)
    removed = candidates.logits < threshold.unsqueeze(-1)
    return replace(candidates, logits=candidates.logits.masked_fill(removed, -torch.inf), filtered=True)


# -- mass ------------------------------------------------------------------------------------------------------------
# Probability mass as integers, whose sums do not depend on how the vocabulary is sharded; and the search for top-p. A
# token's mass is exp(z - max z) in units of 2^-bits, as an int64. Sums of integers are exact in any order, so they
# are equal on all ranks and for any number of ranks.


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

    Uses only + and *, which round in the same way on any machine and at any index of a tensor; torch's exp may not.
    Works in blocks, so that temporaries stay in a core's cache.
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
    """(t, m) [B]: the largest t such that the tokens of mass >= t reach p of the total; the mass that those above t
    miss.

    t is in [low, low + 2^shift), and each round determines its next digit: the masses in this interval are summed by
    that digit, over all ranks. Most tokens have digit 0; their sum is the rest of the interval's mass, so only the
    others are added up.
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
    """As `_threshold`, of weights that are sorted first: each round looks up the mass from each of 2^_WIDE_DIGIT
    weights on."""
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
