"""Log-probabilities of k entries of each token, and of the mass of all others, over a vocabulary sharded over ranks.

With q = softmax(z / T), C the chosen ids of a token and r the mass of the others, the values are log q_c for each c in
C, and log r. With g their gradients, h that of log r:

    d / d z_c = ([c in C] g_c + [c not in C] h q_c / r - q_c (sum g + h)) / T

The others' mass is a sum of its own, and not 1 minus that of the chosen, which is rounded where it is small. One
all-gather of k + 4 values per token (k + 2 without the others); backward sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parallelize.comm.groups import Group
from parallelize.ops import replay_cache
from parallelize.ops.vocabulary.class_targets import local_ids
from parallelize.ops.vocabulary.divergence import combined_over_ranks, normalized, row_totals
from parallelize.ops.vocabulary.token_losses import TokenLoss

T = torch.Tensor


@dataclass
class ChosenStatistics:
    """Of n tokens over all ranks.

    Attributes:
        highest, log_total: [n], the largest of the scaled logits, and log sum exp relative to it.
        others_highest, others_log_total: the same of the entries that are not chosen; 0 without them.
        values: [n, k] or [n, k + 1]; None where they were not saved.
    """

    highest: T
    log_total: T
    others_highest: T
    others_log_total: T
    values: T | None = None


@dataclass(frozen=True)
class ChosenLogProbs(TokenLoss):
    """Log-probabilities of k entries of each of N tokens; behind them, with `others`, of all other entries together.

    Attributes:
        ids: [N, k] positions in this rank's shard, 0 where they are outside of it.
        outside: [N, k], ids of other ranks, and absent ones.
        absent: [N, k], entries without an id, whose value is 0; None if there are none.
        width: entries behind these are padding, and have no probability.
    """

    ids: T
    outside: T
    absent: T | None
    others: bool
    width: int
    temperature: float
    group: Group
    chunk: int
    dtype: torch.dtype
    tail: Callable[[T], T] | None = None
    ignored: T | None = None
    num_saved = 4

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.ids.shape[1] + self.others,)

    def statistics(self, z: T, tokens: slice, maskable: bool) -> ChosenStatistics:
        scaled = self._scaled(z)
        chosen = self._of_ids(scaled, tokens)
        parts = [*row_totals(scaled)]
        if self.others:
            parts += row_totals(self._without_chosen_(scaled, tokens))
        packed = torch.cat((torch.stack(parts, 1), chosen), 1)
        if self.group.size > 1:
            packed = replay_cache.run_collective("all_gather", self.group.all_gather, packed)
        else:
            packed = packed.unsqueeze(0)
        highest, log_total = combined_over_ranks(packed[..., 0], packed[..., 1])
        values = packed[..., len(parts) :].sum(0) - highest.unsqueeze(-1) - log_total.unsqueeze(-1)
        if self.absent is not None:
            values = values.masked_fill(self.absent[tokens], 0.0)
        if not self.others:
            return ChosenStatistics(highest, log_total, torch.zeros_like(highest), torch.zeros_like(highest), values)
        others_highest, others_log_total = combined_over_ranks(packed[..., 2], packed[..., 3])
        of_others = (others_highest - highest) + (others_log_total - log_total)
        values = torch.cat((values, of_others.unsqueeze(-1)), -1)
        return ChosenStatistics(highest, log_total, others_highest, others_log_total, values)

    def losses(self, stats: ChosenStatistics, tokens: slice) -> T:
        assert stats.values is not None
        return stats.values

    def saved(self, stats: ChosenStatistics) -> tuple[T, ...]:
        return stats.highest, stats.log_total, stats.others_highest, stats.others_log_total

    def restored(self, saved: tuple[T, ...]) -> ChosenStatistics:
        return ChosenStatistics(*saved[: self.num_saved])

    def forget(self, stats: ChosenStatistics) -> None:
        """Nothing of the size of logits is kept."""

    def logits_gradient(self, z: T, stats: ChosenStatistics, tokens: slice, scale: T, of_entropy: T | None = None) -> T:
        if self.absent is not None:
            scale = scale.masked_fill(F.pad(self.absent[tokens], (0, int(self.others))), 0.0)
        scaled = self._scaled(z)
        out = normalized(scaled.clone() if self.others else scaled, stats.highest, stats.log_total)
        out.exp_().mul_(-scale.sum(-1, keepdim=True))
        if self.others:
            of_others = normalized(self._without_chosen_(scaled, tokens), stats.others_highest, stats.others_log_total)
            of_others.exp_().mul_(scale[:, -1:]).masked_fill_((scale[:, -1:] == 0.0), 0.0)
            out += of_others
        if self.width:
            of_ids = scale[:, : self.ids.shape[1]].masked_fill(self.outside[tokens], 0.0)
            out.scatter_add_(1, self.ids[tokens], of_ids)
        out /= self.temperature
        return F.pad(out, (0, z.shape[-1] - self.width)) if self.width != z.shape[-1] else out

    def _scaled(self, z: T) -> T:
        """In a new tensor."""
        return z[:, : self.width].to(self.dtype) / self.temperature

    def _of_ids(self, scaled: T, tokens: slice) -> T:
        """[n, k]: the logits of the chosen entries that this rank has, 0 for others."""
        ids, outside = self.ids[tokens], self.outside[tokens]
        if not self.width:
            return scaled.new_zeros(ids.shape)
        return scaled.gather(1, ids).masked_fill_(outside, 0.0)

    def _without_chosen_(self, scaled: T, tokens: slice) -> T:
        """The logits with -inf in the place of the chosen entries. An id of another rank changes nothing: it writes the
        smaller of an entry and infinity."""
        if not self.width:
            return scaled
        ids, outside = self.ids[tokens], self.outside[tokens]
        lowest = torch.full_like(ids, -torch.inf, dtype=self.dtype).masked_fill_(outside, torch.inf)
        return scaled.scatter_reduce_(1, ids, lowest, "amin")


def chosen_positions(ids: T, start: int, width: int, absent: T | None) -> tuple[T, T]:
    """(`ids`, `outside`) of `ChosenLogProbs` from ids of the full vocabulary [N, k]."""
    local, outside = local_ids(ids, start, start + width)
    return (local, outside) if absent is None else (local.masked_fill(absent, 0), outside | absent)
