"""Divergences of a student's and a teacher's distribution over a vocabulary that is sharded over ranks.

With p = softmax(t / T) the teacher's probabilities, q = softmax(s / T) the student's, T the temperature, and
m = b p + (1 - b) q:

    forward_kl   KL(p || q) = sum p (log p - log q)             d / d s_c = (q_c - p_c) / T
    reverse_kl   K = KL(q || p)                                 d / d s_c = q_c (log q_c - log p_c - K) / T
    jsd          b KL(p || m) + (1 - b) K,  K = KL(q || m)      d / d s_c = (1 - b) q_c (log q_c - log m_c - K) / T

Each rank computes with its shard: one all-gather of four values per token gives both normalizers, another one of one
value (two for jsd) the sums. From these, the gradient of a shard takes no message. What has probability 0 adds 0.

Source: Hinton et al., arXiv:1503.02531 (temperature); Agarwal et al., arXiv:2306.13649 sec. 2 (divergences).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F

from parallelize.comm.groups import Group
from parallelize.ops import replay_cache
from parallelize.ops.vocabulary.softmax import lowest_of
from parallelize.ops.vocabulary.token_losses import TokenLoss

T = torch.Tensor
FORWARD_KL, REVERSE_KL, JSD = DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


@dataclass(frozen=True)
class Divergence:
    """Which divergence: its name, `beta` of jsd, and the temperature of both sides."""

    name: str
    beta: float
    temperature: float

    def terms(self, log_p: T, log_q: T) -> tuple[T, ...]:
        """The sums [n] over these entries [n, w]."""
        if self.name == FORWARD_KL:
            return (_expected(log_p, log_p - log_q),)
        if self.name == REVERSE_KL:
            return (_expected(log_q, log_q - log_p),)
        log_m = self._log_mixture(log_p, log_q)
        return _expected(log_p, log_p - log_m), _expected(log_q, log_q - log_m)

    def gradient(self, log_p: T, log_q: T, of_student: T) -> T:
        """[n, w]: d divergence / d student's logits. Overwrites `log_p` and `log_q`. of_student: [n], K above."""
        if self.name == FORWARD_KL:
            return log_q.exp_().sub_(log_p.exp_()).div_(self.temperature)
        other = log_p if self.name == REVERSE_KL else self._log_mixture(log_p, log_q)
        ratio, q = log_q - other, log_q.exp_()
        ratio.sub_(of_student.unsqueeze(-1)).masked_fill_(q == 0.0, 0.0)
        return ratio.mul_(q).mul_((1.0 - self.beta if self.name == JSD else 1.0) / self.temperature)

    def _log_mixture(self, log_p: T, log_q: T) -> T:
        return torch.logaddexp(log_p + log(self.beta), log_q + log(1.0 - self.beta))


def _expected(log_weights: T, values: T) -> T:
    """[n]: sum exp(log_weights) values, without what has no weight."""
    weights = log_weights.exp()
    return values.masked_fill_(weights == 0.0, 0.0).mul_(weights).sum(-1)


@dataclass
class DivergenceStatistics:
    """Of n tokens over all ranks.

    Attributes:
        highest, log_total: [n], the largest logit of the student, and log sum exp of the logits relative to it.
        teacher_highest, teacher_log_total: the same of the teacher.
        of_student: [n], the sum K of the gradient; 0 for forward_kl.
        value: [n], the divergence; None where it was not saved.
        log_p, log_q: [n, w], the log-probabilities of this rank's entries, while they exist.
    """

    highest: T
    log_total: T
    teacher_highest: T
    teacher_log_total: T
    of_student: T
    value: T | None = None
    log_p: T | None = None
    log_q: T | None = None


@dataclass(frozen=True)
class DivergenceLoss(TokenLoss):
    """The divergence of each of N tokens, times its weight.

    Attributes:
        divergence: which one.
        teacher: gives the teacher's logits [n, w] of some tokens, for the w entries of this rank's shard that count.
        width: w; entries behind them are padding, and have no probability.
        weights: [N], or None for 1; 0 for tokens that are ignored.
    """

    divergence: Divergence
    teacher: Callable[[slice], T]
    width: int
    weights: T | None
    ignored: T | None
    group: Group
    chunk: int
    dtype: torch.dtype
    tail: Callable[[T], T] | None = None
    num_saved = 5

    def statistics(self, z: T, tokens: slice, maskable: bool) -> DivergenceStatistics:
        student, teacher = self._scaled(z[:, : self.width]), self._scaled(self.teacher(tokens))
        highest, total, teacher_highest, teacher_total = combined_totals(
            (*row_totals(student), *row_totals(teacher)), self.group
        )
        stats = DivergenceStatistics(highest, total, teacher_highest, teacher_total, torch.zeros_like(highest))
        stats.log_q, stats.log_p = (
            normalized(student, highest, total),
            normalized(teacher, teacher_highest, teacher_total),
        )
        sums = summed(self.divergence.terms(stats.log_p, stats.log_q), self.group)
        stats.value = sums[0] if len(sums) == 1 else torch.lerp(sums[1], sums[0], self.divergence.beta)
        if self.divergence.name != FORWARD_KL:
            stats.of_student = sums[-1]
        return stats

    def losses(self, stats: DivergenceStatistics, tokens: slice) -> T:
        assert stats.value is not None
        return self._weighted(stats.value, tokens)

    def saved(self, stats: DivergenceStatistics) -> tuple[T, ...]:
        return stats.highest, stats.log_total, stats.teacher_highest, stats.teacher_log_total, stats.of_student

    def restored(self, saved: tuple[T, ...]) -> DivergenceStatistics:
        return DivergenceStatistics(*saved[: self.num_saved])

    def forget(self, stats: DivergenceStatistics) -> None:
        stats.log_p = stats.log_q = None

    def logits_gradient(
        self, z: T, stats: DivergenceStatistics, tokens: slice, scale: T, of_entropy: T | None = None
    ) -> T:
        log_p, log_q = stats.log_p, stats.log_q
        if log_p is None or log_q is None:
            log_q = normalized(self._scaled(z[:, : self.width]), stats.highest, stats.log_total)
            log_p = normalized(self._scaled(self.teacher(tokens)), stats.teacher_highest, stats.teacher_log_total)
        out = self.divergence.gradient(log_p, log_q, stats.of_student)
        out = out.masked_fill_((scale == 0.0).unsqueeze(-1), 0.0).mul_(scale.unsqueeze(-1))
        return F.pad(out, (0, z.shape[-1] - self.width)) if self.width != z.shape[-1] else out

    def counts(self, tokens: slice, like: T) -> T:
        return self._weighted(torch.ones_like(like), tokens)

    def without_ignored(self, scale: T) -> T:
        scale = super().without_ignored(scale)
        return scale if self.weights is None else scale * self.weights

    def _weighted(self, values: T, tokens: slice) -> T:
        values = values if self.weights is None else values * self.weights[tokens]
        return values if self.ignored is None else values.masked_fill(self.ignored[tokens], 0.0)

    def _scaled(self, z: T) -> T:
        """logits / temperature in the dtype of the loss, in a new tensor."""
        return z.to(self.dtype) / self.divergence.temperature


def normalized(z: T, highest: T, log_total: T) -> T:
    """log softmax of z [n, w], in its place. Both numbers are subtracted: their sum would be rounded."""
    return z.sub_(highest.unsqueeze(-1)).sub_(log_total.unsqueeze(-1))


def row_totals(z: T) -> tuple[T, T]:
    """(largest logit, sum of exp relative to it) of z [n, w], [n] each; finite and 0 where there are none but -inf."""
    lowest = lowest_of(z.dtype)
    if not z.shape[-1]:  # more ranks than entries
        return z.new_full(z.shape[:-1], lowest), z.new_zeros(z.shape[:-1])
    highest = z.amax(-1).clamp_(min=lowest)
    return highest, (z - highest.unsqueeze(-1)).exp_().sum(-1)


def combined_totals(totals: tuple[T, ...], group: Group) -> tuple[T, ...]:
    """`row_totals` of each rank, of one or several tensors -> (largest, log of the sum) over all ranks, for each.

    Cost: one all-gather of these values.
    """
    parts = torch.stack(totals).unsqueeze(0) if group.size == 1 else _gathered(totals, group)
    out: list[T] = []
    for highs, sums in zip(parts[:, 0::2].unbind(1), parts[:, 1::2].unbind(1), strict=True):
        out += combined_over_ranks(highs, sums)
    return tuple(out)


def combined_over_ranks(highs: T, sums: T) -> tuple[T, T]:
    """(largest, log of the sum) [n] over all ranks, of the `row_totals` of each rank, [ranks, n]."""
    highest = highs.amax(0)
    return highest, ((highs - highest).exp_() * sums).sum(0).log_()


def summed(values: tuple[T, ...], group: Group) -> tuple[T, ...]:
    """The sums over ranks, equal on every rank to the last bit. Cost: one all-gather of these values."""
    return values if group.size == 1 else _gathered(values, group).sum(0).unbind(0)


def _gathered(values: tuple[T, ...], group: Group) -> T:
    """[ranks, number of values, n]."""
    return replay_cache.run_collective("all_gather", group.all_gather, torch.stack(values))
