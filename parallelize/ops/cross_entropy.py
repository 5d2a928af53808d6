"""Cross entropy on logits that are sharded over the vocabulary, and what all losses here want of targets and reductions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.ops.class_targets import HardTargets, SoftTargets, Targets, check_class_weight, soft_part
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.vocabulary import Vocabulary, check_ids


class _CrossEntropy(Function):
    """Per-token loss of sharded logits.

    With q the target's weights and Q their sum (see `class_targets`), z the logits:

        loss = Q lse(z) - sum_c q_c z_c  +  z_loss * lse(z)^2
        d loss / d z_c = softmax_c (Q + 2 z_loss lse) - q_c

    Three reductions of one value a token: maximum, sum of exponentials, and sum of q z (of Q too for soft targets).
    Backward sends nothing and allocates one gradient of the shard.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: Targets, group: Group, z_loss: float) -> torch.Tensor:
        width = logits.shape[-1]
        work = logits if logits.dtype == torch.float64 else logits.float()
        highest = work.amax(-1) if width else work.new_full(work.shape[:-1], -torch.inf)
        if group.size > 1:
            group.all_reduce(highest, dist.ReduceOp.MAX)
        # everything is taken relative to the maximum: z - lse of two large numbers would lose what a sure model leaves
        shifted = work - highest.unsqueeze(-1)
        target = targets.dot(shifted, torch.zeros_like(highest))
        total = shifted.exp_().sum(-1)
        mass = targets.mass() if targets.full_mass is None else targets.full_mass
        if group.size > 1:
            group.all_reduce(total)
            group.all_reduce(target)
            if targets.full_mass is None:
                group.all_reduce(mass)
        log_total = total.log_()
        loss = mass * log_total - target
        if z_loss:
            loss = loss + z_loss * (log_total + highest).square()
        ctx.save_for_backward(logits, highest, log_total, mass)
        ctx.args = targets, z_loss
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        logits, highest, log_total, mass = ctx.saved_tensors
        targets, z_loss = ctx.args
        work = logits if logits.dtype == torch.float64 else logits.float()
        out = (work - highest.unsqueeze(-1)).sub_(log_total.unsqueeze(-1)).exp_()
        out *= (grad * (mass + 2.0 * z_loss * (log_total + highest) if z_loss else mass)).unsqueeze(-1)
        targets.subtract_(out, grad)
        return out.to(logits.dtype), None, None, None


@dataclass(frozen=True)
class Wanted:
    """Targets of N tokens with what a reduction needs.

    Attributes:
        ignored: [N], tokens that count nothing; None where there are none such (soft targets).
        divisor: what a mean divides by: valid tokens, their class weights, or for soft targets all tokens.
    """

    targets: Targets
    ignored: torch.Tensor | None
    divisor: torch.Tensor | int
    shape: tuple[int, ...]

    def reduced(self, losses: torch.Tensor, reduction: str, count: torch.Tensor | int | None = None) -> torch.Tensor:
        """[N] losses, or their sum, reduced. `count`: what a mean divides by, where the caller knows better."""
        if reduction == "none":
            return losses.view(self.shape)
        total = losses.sum() if losses.ndim else losses
        return total if reduction == "sum" else _mean(total, self.divisor if count is None else count)


def _mean(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """total / count. Where nothing counts it is NaN as torch's, but of gradient 0 whatever the total is made of."""
    nothing = torch.as_tensor(count == 0, device=total.device)
    return torch.where(nothing, torch.nan, total / torch.where(nothing, 1, count))


def wanted(
    targets: torch.Tensor,
    lead: tuple[int, ...],
    vocabulary: Vocabulary,
    dtype: torch.dtype,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
) -> Wanted:
    """Check targets [*lead] (or soft ones [*lead, V or V/P]) and take them apart. `dtype`: of the losses.

    Raises: ShapeError `bad-reduction`, `bad-label-smoothing`, `bad-targets`, `bad-class-weight`, `id-out-of-range`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(Problem("bad-reduction", f"reduction is {reduction!r}", fix="mean, sum or none"))
    if not 0.0 <= label_smoothing <= 1.0:
        raise ShapeError(Problem("bad-label-smoothing", f"label_smoothing is {label_smoothing!r}", fix="from 0 to 1"))
    full = vocabulary.full
    check_class_weight(weight, full)
    if targets.is_floating_point():
        if targets.requires_grad:
            raise ShapeError(Problem("bad-targets", "soft targets have no gradient here", fix="`targets.detach()`"))
        part = soft_part(targets, lead, vocabulary)
        flat = part.reshape(prod(lead), part.shape[-1])
        return Wanted(SoftTargets(flat, vocabulary, label_smoothing, weight, dtype), None, len(flat), lead)
    if tuple(targets.shape) != lead:
        raise ShapeError(Problem("bad-targets", f"targets {list(targets.shape)} for logits {[*lead, full]}"))
    ids = targets.reshape(-1).long()
    ignored = ids == ignore_index
    ids = ids.masked_fill(ignored, 0)
    check_ids(ids, full, "targets")
    hard = HardTargets(ids, vocabulary, label_smoothing, weight, dtype)
    divisor = (~ignored).sum() if weight is None else weight.to(dtype)[ids].masked_fill_(ignored, 0.0).sum()
    return Wanted(hard, ignored, divisor, lead)


def token_losses(logits: torch.Tensor, given: Wanted, group: Group, z_loss: float = 0.0) -> torch.Tensor:
    """Loss of each token.

    Shapes (P = group size): logits [..., V/P], this rank's part; returns [N], in float32 at least, 0 where ignored.
    Cost: three all-reduces of one value a token forward (four for soft targets), none backward.
    """
    flat = logits.reshape(prod(given.shape), logits.shape[-1])
    losses = _CrossEntropy.apply(flat, given.targets, group, z_loss)
    return losses if given.ignored is None else losses.masked_fill(given.ignored, 0.0)
