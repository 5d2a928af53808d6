"""Softmax over a vocabulary that lies on several ranks: one all-gather of a few values a token.

Each rank takes the softmax of its own part, and from the parts' maximum, sum of exponentials and sums of interest all ranks
make the same statistics. Nothing here has autograd: it is the inside of the Functions that use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.groups import Group
from parallelize.ops import tape
from parallelize.ops.class_targets import Targets

T = torch.Tensor


@dataclass
class Statistics:
    """Of n tokens, over all ranks: all [n], in float32 at least.

    Attributes:
        highest: the largest logit M. log_total: log sum exp(z - M). dot: sum q (z - M). mass: sum q.
        moment: sum exp(z - M) (z - M), where it was asked for.
        part: [n, V/P], softmax within this rank's part; free to be overwritten. share: what that part weighs among all.
    """

    highest: T
    log_total: T
    dot: T
    mass: T
    moment: T | None
    part: T
    share: T | None

    @property
    def losses(self) -> T:
        """[n]: cross entropy."""
        return self.mass * self.log_total - self.dot

    @property
    def entropies(self) -> T:
        """[n]: lse - sum p z."""
        assert self.moment is not None
        return self.log_total - self.moment * torch.exp(-self.log_total)


def statistics(z: T, targets: Targets, group: Group, *, moment: bool = False, maskable: bool = True) -> Statistics:
    """Softmax statistics of logits z [n, V/P].

    Args:
        maskable: logits may be -inf on all of a rank's part.

    Cost: one all-gather of 4 values a token (5 with `moment`).
    """
    work, lowest = working_dtype(z), lowest_of(working_dtype(z))
    if z.shape[-1]:
        highest = z.amax(-1).to(work).clamp_(min=lowest)
        part = torch.softmax(z, -1, dtype=work)
        total = part.amax(-1).reciprocal_()
        if maskable and group.size > 1:
            masked = highest == lowest
            part.masked_fill_(masked.unsqueeze(-1), 0.0)
            total = total.masked_fill(masked, 0.0)
    else:  # more ranks than entries
        highest, part = z.new_full(z.shape[:-1], lowest, dtype=work), z.to(work)
        total = torch.zeros_like(highest)
    values = [highest, total, targets.dot(z, highest), targets.mass()]
    if moment:
        relative = (z - highest.unsqueeze(-1)).clamp_(min=lowest)  # exp(-inf) (-inf) is 0 here
        values.append(relative.mul_(part).sum(-1) * total)
    if group.size == 1:
        return Statistics(highest, total.log(), values[2], values[3], values[4] if moment else None, part, None)
    return _combined(values, part, group)


def _combined(values: list[T], part: T, group: Group) -> Statistics:
    """[n] values of each rank -> those over all ranks, which are then the same everywhere."""
    of_ranks = tape.sent("all_gather", group.all_gather, torch.stack(values))
    highs, totals, dots, masses, *moments = of_ranks.unbind(1)
    highest = highs.amax(0)
    below = highs - highest
    scale = below.exp()
    total = (totals * scale).sum(0)
    moment = ((moments[0] + totals * below) * scale).sum(0) if moments else None
    share = totals[group.rank] * scale[group.rank] / total
    return Statistics(highest, total.log(), (dots + masses * below).sum(0), masses.sum(0), moment, part, share)


def working_dtype(x: T) -> torch.dtype:
    """float32 at least."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cooled(z: T, temperature: float) -> T:
    """z / temperature, in float32 at least: a narrow quotient would be rounded before the softmax."""
    return z.to(working_dtype(z)) / temperature


def lowest_of(dtype: torch.dtype) -> float:
    """Stands for minus infinity where it must stay finite when another number is taken from it."""
    return torch.finfo(dtype).min / 2
