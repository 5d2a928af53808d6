"""Cross entropy on logits that are sharded over the vocabulary, and the targets and reductions of all losses."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.vocabulary.class_targets import (
    HardTargets,
    SoftTargets,
    Targets,
    Vocabulary,
    check_class_weight,
    check_ids,
    soft_shard,
)
from parallelize.ops.vocabulary.kernel_choice import kernels_for
from parallelize.ops.vocabulary.softmax import SavedStatistics, logits_gradient, working_dtype

T = torch.Tensor


class _CrossEntropy(Function):
    """Loss per token of sharded logits.

    With q the target's weights and Q their sum (see `class_targets`), z the logits:

        loss = Q lse(z) - sum_c q_c z_c  +  z_loss * lse(z)^2
        d loss / d z_c = softmax_c (Q + 2 z_loss lse) - q_c

    Three reductions of one value per token: maximum, sum of exponentials, and sum of q z (and of Q for soft targets).
    Backward communicates nothing and allocates one gradient of the shard.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: Targets, group: Group, z_loss: float) -> torch.Tensor:
        highest, total, target = _relative_sums(logits, targets, group)
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
        of_softmax = grad * (mass + 2.0 * z_loss * (log_total + highest) if z_loss else mass)
        out = logits_gradient(logits, targets, SavedStatistics(highest, log_total, mass), grad, of_softmax)
        return out.to(logits.dtype), None, None, None


def _relative_sums(logits: T, targets: Targets, group: Group) -> tuple[T, T, T]:
    """(M, the largest logit of all ranks; this rank's sum of exp(z - M); this rank's sum of q (z - M)) of logits [n,
    V/P]: [n] each.

    Relative to the maximum: a small loss would be lost in the difference z - lse of two large numbers.
    """
    kernels = kernels_for(logits)
    if kernels is not None:
        highest, total = kernels.row_totals(logits, torch.finfo(torch.float32).min)
        if group.size > 1:
            local_highest = highest.clone()
            group.all_reduce(highest, dist.ReduceOp.MAX)
            total *= (local_highest - highest).exp_()
        return highest, total, targets.dot(logits, highest)
    work = logits.to(working_dtype(logits))
    highest = work.amax(-1) if logits.shape[-1] else work.new_full(work.shape[:-1], -torch.inf)
    if group.size > 1:
        group.all_reduce(highest, dist.ReduceOp.MAX)
    shifted = work - highest.unsqueeze(-1)
    target = targets.dot(shifted, torch.zeros_like(highest))
    return highest, shifted.exp_().sum(-1), target


@dataclass(frozen=True)
class PreparedTargets:
    """Targets of N tokens with what a reduction needs.

    Attributes:
        ignored: [N], tokens that do not count; None if all count (soft targets).
        divisor: what a mean divides by: the number of valid tokens, the sum of their class weights, or for soft targets
            the number of all tokens.
        shape: the shape [...] of the tokens before they were flattened.
    """

    targets: Targets
    ignored: torch.Tensor | None
    divisor: torch.Tensor | int
    shape: tuple[int, ...]

    def reduced(self, losses: torch.Tensor, reduction: str, count: torch.Tensor | int | None = None) -> torch.Tensor:
        """Reduce [N] losses, or their sum. `count` is what a mean divides by instead of `divisor`."""
        if reduction == "none":
            return losses.view(self.shape)
        total = losses.sum() if losses.ndim else losses
        return total if reduction == "sum" else mean_over(total, self.divisor if count is None else count)


def check_positions(targets: T, lead: tuple[int, ...], vocabulary: int) -> None:
    """Raise ShapeError `bad-targets` where ids are not at the positions of logits [*lead, vocabulary]."""
    if tuple(targets.shape) != lead:
        what = f"targets {list(targets.shape)} for logits {[*lead, vocabulary]}"
        fix = "one id at each position of the logits, and a forward that returns those of all positions"
        raise ShapeError(Problem("bad-targets", what, fix=fix))


def check_reduction(reduction: str) -> None:
    """Raises: ShapeError `bad-reduction`."""
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(Problem("bad-reduction", f"reduction is {reduction!r}", fix="mean, sum or none"))


def mean_over(total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """total / count. If no token counts it is NaN, as in torch, with a gradient of 0 for every input of the total."""
    empty = torch.as_tensor(count == 0, device=total.device)
    return torch.where(empty, torch.nan, total / torch.where(empty, 1, count))


def prepare_targets(
    targets: torch.Tensor,
    lead: tuple[int, ...],
    vocabulary: Vocabulary,
    dtype: torch.dtype,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
) -> PreparedTargets:
    """Check and flatten targets [*lead], or soft targets [*lead, V or V/P].

    Args:
        lead: shape of the tokens.
        dtype: the dtype of the losses.

    Raises: ShapeError `bad-reduction`, `bad-label-smoothing`, `bad-targets`, `bad-class-weight`, `id-out-of-range`;
            HandshakeError `replicas-differ`, see `InputCheck`.
    """
    check_reduction(reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ShapeError(Problem("bad-label-smoothing", f"label_smoothing is {label_smoothing!r}", fix="from 0 to 1"))
    full = vocabulary.full
    check_class_weight(weight, full)
    if vocabulary.targets is not None:
        vocabulary.targets.compare("targets", {"targets": targets}, torch.is_grad_enabled())
    if targets.is_floating_point():
        if targets.requires_grad:
            raise ShapeError(Problem("bad-targets", "soft targets have no gradient here", fix="`targets.detach()`"))
        shard = soft_shard(targets, lead, vocabulary)
        flat = shard.reshape(prod(lead), shard.shape[-1])
        return PreparedTargets(SoftTargets(flat, vocabulary, label_smoothing, weight, dtype), None, len(flat), lead)
    check_positions(targets, lead, full)
    ids = targets.reshape(-1).long()
    ignored = ids == ignore_index
    ids = ids.masked_fill(ignored, 0)
    check_ids(ids, full, "targets")
    hard = HardTargets(ids, vocabulary, label_smoothing, weight, dtype)
    divisor = (~ignored).sum() if weight is None else weight.to(dtype)[ids].masked_fill_(ignored, 0.0).sum()
    return PreparedTargets(hard, ignored, divisor, lead)


def token_losses(logits: torch.Tensor, prepared: PreparedTargets, group: Group, z_loss: float = 0.0) -> torch.Tensor:
    """Loss of each token.

    Shapes (P = group size): logits [..., V/P], this rank's shard; returns [N], in float32 at least, 0 for ignored
    tokens.
    Cost: three all-reduces of one value per token forward (four for soft targets), none backward.
    """
    flat = logits.reshape(prod(prepared.shape), logits.shape[-1])
    losses = _CrossEntropy.apply(flat, prepared.targets, group, z_loss)
    return losses if prepared.ignored is None else losses.masked_fill(prepared.ignored, 0.0)
