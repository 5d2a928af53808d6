"""The tokens that may still be drawn, and the filters (top-k, top-p, min-p) that remove some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from parallelize.axes.vocabulary.sampling.mass import bits_for, masses, nucleus
from parallelize.axes.vocabulary.sampling.no_waits import avoids_waits
from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops.random.normal import log
from parallelize.ops.vocabulary.vocabulary_shard import Vocabulary

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
    """Raises: ShapeError `bad-logits` if a row's highest logit is not finite (on an accelerator, a device assertion)."""
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

    Cost, per row: a maximum of one value, at most 13 reductions of 16 values (without waits 10 of 128), an all-gather of one value.
    """
    weights = masses(candidates.logits - candidates.highest().unsqueeze(-1), bits_for(candidates.full))
    selected = nucleus(weights, p, bits_for(candidates.full), candidates.group, by_sorting=candidates.avoids_waits)
    return replace(candidates, logits=candidates.logits.masked_fill(~selected, -torch.inf), filtered=True)


def keep_min_p(candidates: Candidates, min_p: T) -> Candidates:
    """The tokens at least `min_p` times as probable as the most probable one. Cost: a maximum of one value per row."""
    threshold = candidates.highest() + torch.where(min_p > 0.0, log(min_p.clamp(min=1e-300)), -torch.inf)
    removed = candidates.logits < threshold.unsqueeze(-1)
    return replace(candidates, logits=candidates.logits.masked_fill(removed, -torch.inf), filtered=True)
