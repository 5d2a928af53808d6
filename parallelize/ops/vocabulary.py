"""The two ends of a vocabulary-sharded model: embedding lookups, and cross entropy on sharded logits.

Rank r holds rows [start, stop) of a vocabulary of V, cut as `torch.chunk` cuts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.layout import even_interval
from parallelize.ops.collectives import refuse_double_backward


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of `full` entries, sharded over a group."""

    full: int
    group: Group

    @property
    def start(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[0]

    @property
    def stop(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[1]

    def __deepcopy__(self, memo: dict) -> Vocabulary:
        return self


def check_ids(ids: torch.Tensor, full: int, what: str) -> None:
    """Ids beyond the vocabulary would count as another rank's and silently become zeros.

    Raises: ShapeError `id-out-of-range` (on an accelerator, its own asynchronous assertion).
    """
    if ids.is_meta or torch.compiler.is_compiling() or not ids.numel():
        return
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < full)).all())
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= full:
        what = f"{what} lie in {low}..{high}, the vocabulary has {full} entries"
        raise ShapeError(Problem("id-out-of-range", what, fix=f"give ids from 0 to {full - 1}"))


def local_ids(ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids counted from `start`, 0 where they lie outside; the mask of those outside)."""
    outside = (ids < start) | (ids >= stop)
    return (ids - start).masked_fill_(outside, 0), outside


class _CrossEntropy(Function):
    """Per-token loss of sharded logits.

    With y the target, e the label smoothing, z the logits:

        loss = lse(z) - (1 - e) z_y - e/V sum(z)  +  z_loss * lse(z)^2
        d loss / d z_j = softmax_j (1 + 2 z_loss lse) - (1 - e) [j = y] - e/V

    Three reductions of one value a token: maximum, sum of exponentials, and the (smoothed) target logit. Backward sends
    nothing and allocates one gradient of the shard.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocabulary: Vocabulary, smoothing: float, z_loss: float
    ) -> torch.Tensor:
        group, width = vocabulary.group, logits.shape[-1]
        work = logits if logits.dtype == torch.float64 else logits.float()
        ids, outside = local_ids(targets, vocabulary.start, vocabulary.stop)
        highest = work.amax(-1) if width else work.new_full(work.shape[:-1], -torch.inf)
        if group.size > 1:
            group.all_reduce(highest, dist.ReduceOp.MAX)
        # everything is taken relative to the maximum: z - lse of two large numbers would lose what a sure model leaves
        shifted = work - highest.unsqueeze(-1)
        target = shifted.gather(-1, ids.unsqueeze(-1)).squeeze(-1) if width else torch.zeros_like(highest)
        target = target.masked_fill_(outside, 0.0) * (1.0 - smoothing)
        if smoothing:
            target += shifted.sum(-1) * (smoothing / vocabulary.full)
        total = shifted.exp_().sum(-1)
        if group.size > 1:
            group.all_reduce(total)
            group.all_reduce(target)
        log_total = total.log_()
        loss = log_total - target
        if z_loss:
            loss = loss + z_loss * (log_total + highest).square()
        ctx.save_for_backward(logits, ids, outside, highest, log_total)
        ctx.args = smoothing, z_loss, vocabulary.full
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        logits, ids, outside, highest, log_total = ctx.saved_tensors
        smoothing, z_loss, full = ctx.args
        work = logits if logits.dtype == torch.float64 else logits.float()
        out = (work - highest.unsqueeze(-1)).sub_(log_total.unsqueeze(-1)).exp_()
        out *= (grad * (1.0 + 2.0 * z_loss * (log_total + highest)) if z_loss else grad).unsqueeze(-1)
        if smoothing:
            out -= (grad * (smoothing / full)).unsqueeze(-1)
        if logits.shape[-1]:
            share = (grad * (smoothing - 1.0)).masked_fill(outside, 0.0)
            out.scatter_add_(-1, ids.unsqueeze(-1), share.unsqueeze(-1))
        return out.to(logits.dtype), None, None, None, None


def token_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: Vocabulary,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Loss of each token.

    Shapes (P = group size):
        logits   [N, V/P]   this rank's part of the vocabulary
        targets  [N]        full-vocabulary ids, all valid
        returns  [N]        in float32 at least
    Cost: three all-reduces of N values forward, none backward.
    """
    return _CrossEntropy.apply(logits, targets, vocabulary, label_smoothing, z_loss)


def vocabulary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: Vocabulary,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    z_loss: float = 0.0,
    count: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross entropy of a shard of logits, with ignored targets and a reduction over tokens.

    Shapes (P = group size): logits [..., V/P], targets [...], returns a scalar, or [...] with reduction="none".
    `count`: what a mean divides by (default: the valid targets here).

    Raises: ShapeError `bad-reduction`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(Problem("bad-reduction", f"reduction is {reduction!r}", fix="mean, sum or none"))
    flat, ids = logits.reshape(targets.numel(), logits.shape[-1]), targets.reshape(-1)
    ignored = ids == ignore_index
    ids = ids.masked_fill(ignored, 0)
    check_ids(ids, vocabulary.full, "targets")
    losses = token_losses(flat, ids, vocabulary, label_smoothing, z_loss)
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / ((~ignored).sum() if count is None else count)
