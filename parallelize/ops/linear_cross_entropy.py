"""A vocabulary head and its loss in one: logits exist for one chunk of tokens at a time.

For a sum over tokens all gradients are made in the forward, chunk by chunk while the chunk's logits are there, so that no
product is made twice: backward scales them by the one number that comes from above. Where each token has a gradient of its
own from above, backward makes each chunk's logits again, from statistics that the forward has kept: it sends nothing.

Source: the idea of gradients in the forward, Hsu et al., Liger Kernel, arXiv:2410.10989 sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from parallelize import _torch_private as private
from parallelize.groups import Group
from parallelize.ops.class_targets import Targets
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.vocabulary_softmax import Statistics, statistics, working_dtype

T = torch.Tensor
Tail = Callable[[T], T]
Saved = tuple[T, ...]


@dataclass(frozen=True)
class Work:
    """What is computed of hidden states [N, H] under a head [V/P, H].

    Attributes:
        targets: of the N tokens. ignored: [N], tokens that count nothing, or None.
        chunk: tokens whose logits are held at once.
        dtype: of losses and statistics, that of the logits or wider.
        tail: an elementwise function between product and loss, or None.
        entropy: whether entropies are wanted too.
    """

    targets: Targets
    ignored: T | None
    group: Group
    chunk: int
    dtype: torch.dtype
    tail: Tail | None = None
    z_loss: float = 0.0
    entropy: bool = False

    def chunks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(tokens, start + self.chunk))

    def statistics(self, z: T, rows: slice, maskable: bool) -> Statistics:
        targets = self.targets.rows(rows.start, rows.stop)
        return statistics(z, targets, self.group, moment=self.entropy, maskable=maskable or self.tail is not None)

    def losses(self, found: Statistics, rows: slice) -> T:
        losses = found.losses
        if self.z_loss:
            losses = losses + self.z_loss * (found.log_total + found.highest).square()
        return losses if self.ignored is None else losses.masked_fill_(self.ignored[rows], 0.0)

    def counts(self, rows: slice, like: T) -> T:
        """1 for each token of these rows that counts, else 0."""
        ones = torch.ones_like(like)
        return ones if self.ignored is None else ones.masked_fill_(self.ignored[rows], 0.0)

    def softmax_scale(self, found: Any, scale: T) -> T:
        """What a loss's gradient has of the softmax, where `scale` [n] comes from above."""
        mass = found.mass
        return scale * (mass + 2.0 * self.z_loss * (found.log_total + found.highest) if self.z_loss else mass)


def default_chunk(tokens: int, hidden_size: int) -> int:
    """An eighth of the tokens, and no more than have logits of a quarter of the size of the head's own gradient.

    At least 128: fewer would make products slow. More would be neither faster nor small. Measured: docs/vocabulary.md.
    """
    return max(128, min(-(-tokens // 8), hidden_size // 4))


class _Sum(Function):
    """The sum of the tokens' losses, with gradients made in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: T, weight: T, bias: T | None, work: Work, train: bool) -> T:
        needs = tuple(need and train for need in ctx.needs_input_grad[:3])
        gradients = _Gradients(needs, hidden, weight)
        losses = hidden.new_empty(hidden.shape[0], dtype=work.dtype)
        saved = [torch.empty_like(losses) for _ in range(3)]
        for rows in work.chunks(hidden.shape[0]):
            found = _forward_chunk(hidden[rows], weight, bias, work, rows, gradients)
            losses[rows] = work.losses(found, rows)
            for kept, value in zip(saved, (found.highest, found.log_total, found.mass), strict=True):
                kept[rows] = value
        ctx.work, ctx.needs, ctx.gradients = work, needs, gradients
        ctx.save_for_backward(hidden, weight, bias, *saved)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        hidden, weight, bias, *saved = ctx.saved_tensors
        # only what is used is given away: of a backward in two halves each half takes its own
        used = [private.will_run(node) for node, _ in ctx.next_functions] + [False] * 3
        needs = tuple(need and use for need, use in zip(ctx.needs, used, strict=False))
        if ctx.gradients.has(needs):
            return *ctx.gradients.given(needs, grad), None, None
        # a second backward through the same graph: the first one was given the tensors themselves
        scale = ctx.work.counts(slice(0, hidden.shape[0]), saved[0]) * grad
        return *_again(needs, hidden, weight, bias, ctx.work, tuple(saved), scale, None), None, None


class _Tokens(Function):
    """(losses [N], entropies [N] or [0]) of tokens that each have a gradient from above."""

    @staticmethod
    def forward(ctx: Any, hidden: T, weight: T, bias: T | None, work: Work):
        losses = hidden.new_empty(hidden.shape[0], dtype=work.dtype)
        saved = [torch.empty_like(losses) for _ in range(3)]
        entropies = torch.empty_like(losses if work.entropy else losses[:0])
        for rows in work.chunks(hidden.shape[0]):
            found = _forward_chunk(hidden[rows], weight, bias, work, rows, None)
            losses[rows] = work.losses(found, rows)
            if work.entropy:
                entropies[rows] = found.entropies
            for kept, value in zip(saved, (found.highest, found.log_total, found.mass), strict=True):
                kept[rows] = value
        ctx.work, ctx.needs = work, ctx.needs_input_grad[:3]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *saved, entropies)
        return losses, entropies

    @staticmethod
    def backward(ctx: Any, grad: T | None, entropy_grad: T | None):
        refuse_double_backward()
        hidden, weight, bias, *saved = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(saved[0])
        elif ctx.work.ignored is not None:
            grad = grad.masked_fill(ctx.work.ignored, 0.0)
        entropy_grad = entropy_grad if ctx.work.entropy else None
        return *_again(ctx.needs, hidden, weight, bias, ctx.work, tuple(saved), grad, entropy_grad), None


def linear_losses(
    hidden: T, weight: T, bias: T | None, work: Work, *, total: bool, train: bool | None = None
) -> tuple[T, T]:
    """Losses of tokens under a head, and their entropies.

    Shapes (P = group size):
        hidden   [N, H]      the same on every rank; its gradient is this rank's part of a sum
        weight   [V/P, H]    bias [V/P] or None
        returns  (a scalar with `total`, else [N]; [N] where work.entropy, else [0]), in float32 at least

    Memory: one chunk's logits with their softmax (and `total`: the gradients themselves); with a tail its own besides.
    Cost: one all-gather of 4 or 5 values a token, chunk by chunk; nothing backward.
    """
    with _without_autocast(hidden):
        if total and not work.entropy:
            train = torch.is_grad_enabled() if train is None else train
            return _Sum.apply(hidden, weight, bias, work, train), hidden.new_empty(0)
        losses, entropies = _Tokens.apply(hidden, weight, bias, work)
        return losses.sum() if total else losses, entropies


def _forward_chunk(
    hidden: T, weight: T, bias: T | None, work: Work, rows: slice, gradients: _Gradients | None
) -> Statistics:
    """Statistics of one chunk; its part of the gradients is added where they are wanted."""
    wanted = gradients is not None and gradients.any
    raw, z = _logits(hidden, weight, bias, work.tail, wanted)
    found = work.statistics(z.detach(), rows, maskable=bias is not None)
    part, found.part = found.part, found.part[:0]
    if gradients is not None and wanted:
        scale = work.counts(rows, found.highest)
        of_softmax = work.softmax_scale(found, scale)
        part *= (of_softmax if found.share is None else of_softmax * found.share).unsqueeze(-1)
        work.targets.rows(rows.start, rows.stop).subtract_(part, scale)
        gradients.add(rows, hidden, weight, _through_tail(raw, z, part))
    return found


def _again(
    needs: tuple[bool, ...],
    hidden: T,
    weight: T,
    bias: T | None,
    work: Work,
    saved: Saved,
    scale: T,
    entropy_scale: T | None,
) -> tuple[T | None, T | None, T | None]:
    """Gradients from logits made again: `scale` [N] comes from above for losses, `entropy_scale` for entropies."""
    gradients = _Gradients(needs, hidden, weight)
    with _without_autocast(hidden):
        for rows in work.chunks(hidden.shape[0]) if gradients.any else ():
            raw, z = _logits(hidden[rows], weight, bias, work.tail, True)
            kept = Kept(*(value[rows] for value in saved))
            of_entropy = None if entropy_scale is None else entropy_scale[rows]
            of_softmax = work.softmax_scale(kept, scale[rows])
            out = logits_gradient(z.detach(), kept, of_softmax, of_entropy)
            work.targets.rows(rows.start, rows.stop).subtract_(out, scale[rows])
            gradients.add(rows, hidden[rows], weight, _through_tail(raw, z, out))
            del raw, z, out
    return gradients.given(needs, None)


@dataclass(frozen=True)
class Kept:
    """What backward needs of the forward: [n] each."""

    highest: T
    log_total: T
    mass: T
    entropies: T | None = None


def logits_gradient(z: T, kept: Kept, of_softmax: T, of_entropy: T | None) -> T:
    """[n, V/P]: of_softmax p + of_entropy d(entropy), with d(entropy)/dz_c = -p_c (log p_c + entropy)."""
    log_p = (z - kept.highest.unsqueeze(-1)).sub_(kept.log_total.unsqueeze(-1))
    if of_entropy is None:
        return log_p.exp_().mul_(of_softmax.unsqueeze(-1))
    assert kept.entropies is not None
    p = log_p.exp()
    constant = of_softmax - of_entropy * kept.entropies
    log_p.masked_fill_(p == 0.0, 0.0)  # 0 log 0 is 0, whatever comes from above
    return log_p.mul_(-of_entropy.unsqueeze(-1)).add_(constant.unsqueeze(-1)).mul_(p)


def _logits(hidden: T, weight: T, bias: T | None, tail: Tail | None, differentiable: bool) -> tuple[T, T]:
    """(the product, the logits that come of it); with a tail the second is a function of the first."""
    raw = F.linear(hidden, weight, bias)
    if tail is None:
        return raw, raw
    if not differentiable:
        return raw, tail(raw)
    raw.requires_grad_()
    # what the tail saves is this chunk's own: hooks of a recomputed unit around it must not see it
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        return raw, tail(raw)


def _as_it_is(x: T) -> T:
    return x


def _through_tail(raw: T, z: T, grad: T) -> T:
    """The gradient of the product from that of the logits."""
    if z is raw:
        return grad
    (out,) = torch.autograd.grad(z, raw, grad.to(z.dtype))
    return out


class _Gradients:
    """Gradients of hidden states, weight and bias, as far as they are needed, summed in float32 at least."""

    def __init__(self, needs: tuple[bool, ...], hidden: T, weight: T):
        self.needs, self.any, self.dtype = needs, any(needs), weight.dtype
        self.work = working_dtype(weight)
        self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        self.weight = weight.new_zeros(weight.shape, dtype=self.work) if needs[1] else None
        self.bias = weight.new_zeros(weight.shape[0], dtype=self.work) if needs[2] else None

    def add(self, rows: slice, hidden: T, weight: T, grad: T) -> None:
        if self.bias is not None:
            self.bias += grad.sum(0)
        grad = grad.to(self.dtype)
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[rows])
        if self.weight is None:
            return
        if self.work == self.dtype:
            self.weight.addmm_(grad.t(), hidden)
        else:  # no product of narrow tensors adds to a wide one
            self.weight += grad.t() @ hidden

    def has(self, needs: tuple[bool, ...]) -> bool:
        """Whether none of these was given away."""
        held = (self.hidden, self.weight, self.bias)
        return not any(need and grad is None for need, grad in zip(needs, held, strict=True))

    def given(self, needs: tuple[bool, ...], scale: T | None) -> tuple[T | None, T | None, T | None]:
        """These gradients, scaled, in the dtypes of what they belong to. They are not kept here."""
        out: list[T | None] = []
        for name, need in zip(("hidden", "weight", "bias"), needs, strict=True):
            grad = getattr(self, name) if need else None
            if grad is not None:
                setattr(self, name, None)
                grad = (grad if scale is None else grad.mul_(scale)).to(self.dtype)
            out.append(grad)
        return out[0], out[1], out[2]


def _without_autocast(x: T) -> Any:
    """Casting is done by who calls: inside, dtypes are as given."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
