"""A vocabulary head and its loss in one: logits exist for one chunk of tokens at a time.

For a sum over tokens, all gradients are computed in the forward, chunk by chunk while the chunk's logits exist, so that
no matmul runs twice: backward scales them by the gradient of the sum, which is one number. If each token has its own
output gradient, backward recomputes the logits of each chunk, and their softmax from statistics that the forward has
saved: it communicates nothing.

Source: gradients in the forward, Hsu et al., Liger Kernel, arXiv:2410.10989 sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.vocabulary.class_targets import HardTargets, Targets
from parallelize.ops.vocabulary.softmax import SavedStatistics, Statistics, logits_gradient, statistics, working_dtype
from parallelize.ops.vocabulary.token_losses import TokenLoss

T = torch.Tensor
Tail = Callable[[T], T]
Saved = tuple[T, ...]


@dataclass(frozen=True)
class HeadLoss(TokenLoss):
    """Cross entropy with targets, and entropies.

    Attributes:
        targets: the targets of the N tokens.
        ignored: [N], tokens that do not count, or None.
        chunk: number of tokens whose logits exist at the same time.
        dtype: the dtype of losses and statistics: that of the logits or a wider one.
        tail: an elementwise function between matmul and loss, or None.
        entropy: whether entropies are computed too.
    """

    targets: Targets
    ignored: T | None
    group: Group
    chunk: int
    dtype: torch.dtype
    tail: Tail | None = None
    z_loss: float = 0.0
    entropy: bool = False
    num_saved = 3

    @property
    def has_gradients_in_place(self) -> bool:
        """Whether kernels of a GPU compute gradients in the place of logits, without other tensors of their size."""
        return (
            self.tail is None
            and not self.entropy
            and isinstance(self.targets, HardTargets)
            and not self.targets.smoothing
        )

    def targets_of(self, tokens: slice) -> Targets:
        return self.targets.of_tokens(tokens.start, tokens.stop)

    def statistics(self, z: T, tokens: slice, maskable: bool) -> Statistics:
        targets, maskable = self.targets_of(tokens), maskable or self.tail is not None
        return statistics(z, targets, self.group, moment=self.entropy, maskable=maskable)

    def losses(self, stats: Statistics, tokens: slice) -> T:
        losses = stats.losses
        if self.z_loss:
            losses = losses + self.z_loss * (stats.log_total + stats.highest).square()
        return losses if self.ignored is None else losses.masked_fill_(self.ignored[tokens], 0.0)

    def saved(self, stats: Statistics) -> Saved:
        """In the order of `SavedStatistics`."""
        return stats.highest, stats.log_total, stats.mass

    def restored(self, saved: Saved) -> SavedStatistics:
        return SavedStatistics(*saved)

    def forget(self, stats: Statistics) -> None:
        stats.local_softmax = None

    def softmax_scale(self, stats: Statistics | SavedStatistics, scale: T) -> T:
        """The factor of the softmax in the gradient of losses whose own gradient is `scale` [n]."""
        factor = stats.mass
        if self.z_loss:
            factor = factor + 2.0 * self.z_loss * (stats.log_total + stats.highest)
        return scale * factor

    def logits_gradient(
        self, z: T, stats: Statistics | SavedStatistics, tokens: slice, scale: T, of_entropy: T | None = None
    ) -> T:
        targets, of_softmax = self.targets_of(tokens), self.softmax_scale(stats, scale)
        return logits_gradient(z, targets, stats, scale, of_softmax, of_entropy, overwrite=self.tail is None)


def check_storage(weight: T, why: str = "before the loss or the deferred logits were computed") -> None:
    """Raises: ModelError `weight-let-go` if `fully_shard` has freed a weight that the loss still needs."""
    if weight.numel() and not weight.is_meta and not weight.untyped_storage().nbytes():
        what = f"`fully_shard` freed the head's weight {why}"
        fix = (
            "take loss and metrics before backward, and leave the head in the root's unit; or take both in the "
            "forward; "
            "for two backwards of one loss, train without fuse_loss"
        )
        raise ModelError(Problem("weight-let-go", what, fix=fix))


def default_chunk(hidden: T, weight: T, *, in_place: bool = False) -> int:
    """Tokens whose logits exist at the same time, for hidden states [N, H] and a head [V/P, H]. Measured:
    docs/vocabulary.md.

    Args:
        in_place: whether on a GPU each chunk's gradient takes the place of its logits, and is added to that of the
            head.

    An eighth of N, but not more than have logits of a quarter of the size of the head's own gradient; at least 128,
    because fewer make the matmuls slow. On a CPU larger chunks are not faster. On a GPU they are, where each adds to
    the head's gradient, which is read and written for that. In half precision, in place, H tokens cost no memory there:
    their logits are as large as the rounded gradient, which exists later.
    """
    tokens, width = hidden.shape
    if in_place and hidden.is_cuda and weight.requires_grad and weight.dtype.itemsize == 2:
        return max(128, width)
    return max(128, min(-(-tokens // 8), width // 4))


class _Sum(Function):
    """The sum of the tokens' losses, with gradients computed in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: T, weight: T, bias: T | None, loss: TokenLoss, train: bool) -> T:
        needs = tuple(need and train for need in ctx.needs_input_grad[:3])
        gradients = _GradientAccumulator(needs, hidden, weight)
        losses, saved = loss.new_losses(hidden, hidden.shape[0]), loss.new_saved(hidden, hidden.shape[0])
        for tokens in loss.chunks(hidden.shape[0]):
            stats = _forward_chunk(hidden[tokens], weight, bias, loss, tokens, gradients)
            losses[tokens] = loss.losses(stats, tokens)
            loss.save(saved, stats, tokens)
        ctx.loss, ctx.needs, ctx.gradients = loss, needs, gradients
        ctx.save_for_backward(hidden, weight, bias, *saved)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        hidden, weight, bias, *saved = ctx.saved_tensors
        # take only gradients that will be used: a backward that is split in two takes some in each part
        used = [private.will_run(node) for node, _ in ctx.next_functions] + [False] * 3
        needs = tuple(need and use for need, use in zip(ctx.needs, used, strict=False))
        if ctx.gradients.has(needs):
            return *ctx.gradients.take(needs, ctx.loss.scale_of_sum(grad)), None, None
        # a second backward through the same graph: the first one has taken the tensors themselves
        scale = ctx.loss.without_ignored(grad.expand(hidden.shape[0]))
        return *_recomputed_gradients(needs, hidden, weight, bias, ctx.loss, tuple(saved), scale, None), None, None


class _Tokens(Function):
    """(losses [N], entropies [N] or [0]) of tokens, each with its own output gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: T, weight: T, bias: T | None, loss: TokenLoss):
        losses, saved = loss.new_losses(hidden, hidden.shape[0]), loss.new_saved(hidden, hidden.shape[0])
        entropies = torch.empty_like(losses if loss.entropy else losses[:0])
        for tokens in loss.chunks(hidden.shape[0]):
            stats = _forward_chunk(hidden[tokens], weight, bias, loss, tokens, None)
            losses[tokens] = loss.losses(stats, tokens)
            if loss.entropy:
                entropies[tokens] = stats.entropies
            loss.save(saved, stats, tokens)
        ctx.loss, ctx.needs = loss, ctx.needs_input_grad[:3]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *saved, entropies)
        return losses, entropies

    @staticmethod
    def backward(ctx: Any, grad: T | None, entropy_grad: T | None):
        refuse_double_backward()
        hidden, weight, bias, *saved = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(saved[0])
        else:
            grad = ctx.loss.without_ignored(grad)
        entropy_grad = entropy_grad if ctx.loss.entropy else None
        grads = _recomputed_gradients(ctx.needs, hidden, weight, bias, ctx.loss, tuple(saved), grad, entropy_grad)
        return *grads, None


def linear_losses(
    hidden: T, weight: T, bias: T | None, loss: TokenLoss, *, total: bool, train: bool | None = None
) -> tuple[T, T]:
    """Losses of tokens under a head, and their entropies.

    Shapes (P = group size):
        hidden   [N, H]      the same on every rank; its gradient is this rank's part of a sum
        weight   [V/P, H]    bias [V/P] or None
        returns  (a scalar with `total`, else [N]; [N] if loss.entropy, else [0]), in float32 at least

    Memory: the logits of one chunk and their softmax; with `total` the gradients themselves; with a tail what it saves.
    Cost: one all-gather of 4 or 5 values per token, chunk by chunk; nothing backward.
    """
    with without_autocast(hidden):
        if total and not loss.entropy:
            train = torch.is_grad_enabled() if train is None else train
            return _Sum.apply(hidden, weight, bias, loss, train), hidden.new_empty(0)
        losses, entropies = _Tokens.apply(hidden, weight, bias, loss)
        return losses.sum() if total else losses, entropies


def _forward_chunk(
    hidden: T, weight: T, bias: T | None, loss: TokenLoss, tokens: slice, gradients: _GradientAccumulator | None
) -> Any:
    """Statistics of one chunk; adds its part of the gradients that are needed."""
    differentiable = gradients is not None and gradients.any
    raw, z = _logits(hidden, weight, bias, loss.tail, differentiable)
    stats = loss.statistics(z.detach(), tokens, maskable=bias is not None)
    if gradients is not None and differentiable:
        scale = loss.counts(tokens, stats.highest)
        grad = loss.logits_gradient(z.detach(), stats, tokens, scale)
        gradients.add(tokens, hidden, weight, _backward_of_tail(raw, z, grad))
    loss.forget(stats)
    return stats


def _recomputed_gradients(
    needs: tuple[bool, ...],
    hidden: T,
    weight: T,
    bias: T | None,
    loss: TokenLoss,
    saved: Saved,
    scale: T,
    entropy_scale: T | None,
) -> tuple[T | None, T | None, T | None]:
    """Gradients from recomputed logits, given those of the losses, `scale` [N], and of the entropies,
    `entropy_scale`."""
    check_storage(weight, "before a second backward of the loss, which recomputes the logits")
    gradients = _GradientAccumulator(needs, hidden, weight)
    with without_autocast(hidden):
        for tokens in loss.chunks(hidden.shape[0]) if gradients.any else ():
            raw, z = _logits(hidden[tokens], weight, bias, loss.tail, True)
            stats = loss.restored(tuple(value[tokens] for value in saved))
            of_entropy = None if entropy_scale is None else entropy_scale[tokens]
            grad = loss.logits_gradient(z.detach(), stats, tokens, scale[tokens], of_entropy)
            gradients.add(tokens, hidden[tokens], weight, _backward_of_tail(raw, z, grad))
            del raw, z, grad
    return gradients.take(needs, None)


def _logits(hidden: T, weight: T, bias: T | None, tail: Tail | None, differentiable: bool) -> tuple[T, T]:
    """(the matmul's output, the logits); with a tail, the logits are a function of the output."""
    raw = F.linear(hidden, weight, bias)
    if tail is None:
        return raw, raw
    if not differentiable:
        return raw, tail(raw)
    raw.requires_grad_()
    # what the tail saves belongs to this chunk: saved-tensor hooks of a recomputed unit around it must not see it
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
        return raw, tail(raw)


def _identity(x: T) -> T:
    return x


def _backward_of_tail(raw: T, z: T, grad: T) -> T:
    """The gradient of the matmul's output from that of the logits."""
    if z is raw:
        return grad
    (out,) = torch.autograd.grad(z, raw, grad.to(z.dtype))
    return out


class _GradientAccumulator:
    """The gradients that are needed of hidden states, weight and bias, summed over chunks in float32 at least."""

    def __init__(self, needs: tuple[bool, ...], hidden: T, weight: T):
        self.needs, self.any, self.dtype = needs, any(needs), weight.dtype
        self.work = working_dtype(weight)
        self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        self.weight = weight.new_empty(weight.shape, dtype=self.work) if needs[1] else None
        if self.weight is not None and not hidden.shape[0]:
            self.weight.zero_()
        self.is_first = True
        self.bias = weight.new_zeros(weight.shape[0], dtype=self.work) if needs[2] else None

    def add(self, tokens: slice, hidden: T, weight: T, grad: T) -> None:
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.work)
        grad = grad.to(self.dtype)
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[tokens])
        if self.weight is not None:
            self._add_to_weight(self.weight, grad, hidden)

    def _add_to_weight(self, total: T, grad: T, hidden: T) -> None:
        beta, self.is_first = 0.0 if self.is_first else 1.0, False  # 0: what is stored is not read
        if self.work == self.dtype:
            total.addmm_(grad.t(), hidden, beta=beta)
        elif _accumulates_wider(grad):
            torch.addmm(total, grad.t(), hidden, beta=beta, out_dtype=self.work, out=total)
        elif beta:
            total += grad.t() @ hidden
        else:
            total.copy_(grad.t() @ hidden)

    def has(self, needs: tuple[bool, ...]) -> bool:
        """Whether none of these was taken."""
        stored = (self.hidden, self.weight, self.bias)
        return not any(need and grad is None for need, grad in zip(needs, stored, strict=True))

    def take(self, needs: tuple[bool, ...], scale: T | None) -> tuple[T | None, T | None, T | None]:
        """These gradients, scaled, in the head's dtype. They are no longer stored here."""
        out: list[T | None] = []
        for name, need in zip(("hidden", "weight", "bias"), needs, strict=True):
            grad = getattr(self, name) if need else None
            if grad is not None:
                setattr(self, name, None)
                grad = _scaled(grad, scale, self.dtype)
            out.append(grad)
        return out[0], out[1], out[2]


def _scaled(grad: T, scale: T | None, dtype: torch.dtype) -> T:
    """grad * scale in `dtype`; overwrites `grad` where that needs no more memory or time."""
    # in one pass: a CPU would store the wide product too
    if scale is not None and grad.is_cuda and grad.dtype != dtype:
        return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))
    return (grad if scale is None else grad.mul_(scale)).to(dtype)


def _accumulates_wider(x: T) -> bool:
    """Whether a matmul of half-precision tensors can add to a float32 tensor: CUDA's alone.

    On an H200 it takes 0.56 of the time of a product that is added afterwards, and the product is not rounded.
    """
    return x.is_cuda and torch.version.cuda is not None


def without_autocast(x: T) -> Any:
    """Autocast off: the caller casts, and the dtypes inside are those of the arguments."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
