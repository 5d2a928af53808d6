"""The tokens that may still be drawn, and the filters that leave fewer of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.ops.vocabulary import Vocabulary
from parallelize.randomness.normal import log
from parallelize.sampling.mass import bits_for, masses, nucleus

T = torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """Tokens of B rows: this rank's part, the others' lie on the ranks of `group`.

    Args:
        logits: [B, n], -inf where a token is removed.
        ids: [B, n] or [1, n], increasing along a row and over the ranks, so that what comes first has the lowest id.
        full: how many there are over all ranks.
        most: the largest n of any rank.
        thinned: whether tokens were removed.
    """

    logits: T
    ids: T
    full: int
    most: int
    group: Group
    thinned: bool = False

    @staticmethod
    def of(local: T, vocabulary: Vocabulary) -> Candidates:
        ids = torch.arange(vocabulary.start, vocabulary.stop, device=local.device).unsqueeze(0)
        most = -(-vocabulary.full // vocabulary.group.size)
        return Candidates(local, ids, vocabulary.full, most, vocabulary.group)

    def cooled(self, heat: T) -> Candidates:
        """In float64, divided by a temperature, or by one a row; rows of temperature 0 stay as they are."""
        by = torch.where(heat == 0.0, 1.0, heat)
        return replace(self, logits=self.logits.double() / (by.unsqueeze(-1) if by.ndim else by))

    def nothing(self) -> tuple[T, T]:
        """(score, token) [B] that lose against any."""
        rows = len(self.logits)
        score = torch.full((rows,), -torch.inf, dtype=torch.float64, device=self.logits.device)
        return score, torch.full((rows,), self.full, device=self.logits.device)

    def packed(self) -> Candidates:
        """Without most of what is removed, where that is most of all: noise is not drawn for it."""
        if not self.thinned or not self.logits.shape[1]:
            return self
        most = max(1, int((self.logits > -torch.inf).sum(-1).max()))
        at = _highest(self.logits, most)
        return replace(self, logits=self.logits.gather(1, at), ids=self.ids.expand(self.logits.shape).gather(1, at))

    def highest(self) -> T:
        """The highest logit [B] of each row over all ranks, as float64. Raises: ShapeError `bad-logits`."""
        values = self.logits.amax(-1).double() if self.logits.shape[1] else self.nothing()[0]
        values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if self.group.size > 1:
            self.group.all_reduce(values, dist.ReduceOp.MAX)
        check_highest(values)
        return values

    def gathered_best(self, score: T, token: T) -> tuple[T, T]:
        """The best of all ranks' (score, token) [B]; of equal scores the first rank's, whose tokens are lower."""
        if self.group.size == 1:
            return score, token
        pairs = self.group.all_gather(torch.stack((score.view(torch.int64), token)))
        scores, tokens = pairs[:, 0].view(torch.float64), pairs[:, 1]
        best = scores.argmax(0, keepdim=True)
        return scores.gather(0, best).squeeze(0), tokens.gather(0, best).squeeze(0)


def check_highest(values: T) -> None:
    """Raises: ShapeError `bad-logits` where a row's highest is not finite (on an accelerator, its own assertion)."""
    if values.device.type != "cpu":
        torch._assert_async(values.isfinite().all())
    elif not values.isfinite().all():
        row = int((~values.isfinite()).nonzero()[0])
        what = f"row {row} of {len(values)} has a NaN or +inf among its logits, or nothing but -inf"
        raise ShapeError(Problem("bad-logits", what, fix="look for an overflow before the head, or an all-masked row"))


def keep_top_k(found: Candidates, k: int) -> Candidates:
    """The k highest of each row, gathered on every rank; of equal logits the lowest ids.

    Cost: min(k, V/P) pairs of 16 bytes a row and rank, gathered.
    """
    if k == 0 or k >= found.full:
        return found
    here = min(k, found.most)
    logits = found.logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    at = _highest(logits, here)
    logits, ids = logits.gather(1, at).double(), found.ids.expand(logits.shape).gather(1, at)
    if found.group.size > 1:
        short = (0, here - at.shape[1])
        logits = torch.nn.functional.pad(logits, short, value=-torch.inf)
        ids = torch.nn.functional.pad(ids, short, value=found.full)
        pairs = found.group.all_gather(torch.stack((logits.view(torch.int64), ids)))
        logits, ids = pairs.permute(1, 2, 0, 3).flatten(2)
        logits = logits.contiguous().view(torch.float64)
        at = _highest(logits, k)
        logits, ids = logits.gather(1, at), ids.gather(1, at)
    return Candidates(logits, ids, k, k, Group.alone())


def _highest(logits: T, k: int) -> T:
    """Where the k highest of each row stand, [B, k], in the order of the row; of equal ones those that stand first."""
    rows, width = logits.shape
    if k >= width:
        return torch.arange(width, device=logits.device).expand(rows, width)
    least = logits.topk(k).values[:, -1:]
    above, equal = logits > least, logits == least
    room = k - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    return kept.nonzero_static(size=rows * k)[:, 1].view(rows, k)


def keep_top_p(found: Candidates, p: T) -> Candidates:
    """The smallest set of the highest whose mass reaches p of the whole; of equal ones the lowest ids.

    Cost: a maximum of one value a row, at most 13 reductions of 16, a gather of one.
    """
    weights = masses(found.logits - found.highest().unsqueeze(-1), bits_for(found.full))
    kept = nucleus(weights, p, bits_for(found.full), found.group)
    return replace(found, logits=found.logits.masked_fill(~kept, -torch.inf), thinned=True)


def keep_min_p(found: Candidates, share: T) -> Candidates:
    """Those at least `share` times as probable as the most probable. Cost: a maximum of one value a row."""
    least = found.highest() + torch.where(share > 0.0, log(share.clamp(min=1e-300)), -torch.inf)
    removed = found.logits < least.unsqueeze(-1)
    return replace(found, logits=found.logits.masked_fill(removed, -torch.inf), thinned=True)
