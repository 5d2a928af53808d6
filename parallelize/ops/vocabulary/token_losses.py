"""What a loss computes of the logits of a chunk of tokens, whether the logits exist or a head computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch.autograd import Function

from parallelize.comm.groups import Group
from parallelize.ops.collectives import refuse_double_backward

T = torch.Tensor


class TokenLoss(ABC):
    """A loss of each of N tokens, computed for one chunk of them at a time.

    Attributes:
        ignored: [N], tokens that do not count, or None.
        group: over which the vocabulary is sharded.
        chunk: number of tokens whose logits exist at the same time.
        dtype: the dtype of losses and statistics: that of the logits or a wider one.
        tail: an elementwise function between a head's matmul and the loss, or None.
        entropy: whether entropies are computed too.
        shape: of the values of one token; () for one number.
        num_saved: how many values of each token `saved` returns.
    """

    ignored: T | None
    group: Group
    chunk: int
    dtype: torch.dtype
    tail: Callable[[T], T] | None = None
    entropy: bool = False
    shape: tuple[int, ...] = ()
    num_saved: int

    @abstractmethod
    def statistics(self, z: T, tokens: slice, maskable: bool) -> Any:
        """What losses and gradients of these tokens are computed from, given this rank's logits z [n, V/P]. It sends
        messages.

        Args:
            maskable: whether all logits of a rank's shard may be -inf.
        """

    @abstractmethod
    def losses(self, stats: Any, tokens: slice) -> T:
        """[n, *shape]; 0 for ignored tokens."""

    @abstractmethod
    def saved(self, stats: Any) -> tuple[T, ...]:
        """The statistics that backward needs, [n] each."""

    @abstractmethod
    def restored(self, saved: tuple[T, ...]) -> Any:
        """Statistics from what was `saved`, behind which the entropies may be."""

    @abstractmethod
    def logits_gradient(self, z: T, stats: Any, tokens: slice, scale: T, of_entropy: T | None = None) -> T:
        """[n, V/P], given the gradients of the losses, `scale` [n, *shape], and of the entropies. Where the loss has no
        tail it may overwrite z."""

    @abstractmethod
    def forget(self, stats: Any) -> None:
        """Free what has the size of logits."""

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.chunk):
            yield slice(start, min(num_tokens, start + self.chunk))

    def new_losses(self, like: T, num_tokens: int) -> T:
        return like.new_empty((num_tokens, *self.shape), dtype=self.dtype)

    def new_saved(self, like: T, num_tokens: int) -> list[T]:
        return [like.new_empty(num_tokens, dtype=self.dtype) for _ in range(self.num_saved)]

    def save(self, saved: list[T], stats: Any, tokens: slice) -> None:
        for tensor, value in zip(saved, self.saved(stats), strict=True):
            tensor[tokens] = value

    def counts(self, tokens: slice, like: T) -> T:
        """By what the sum of losses changes with those of each of these tokens, [n, *shape]: 1, or 0 if it is ignored.

        like: [n], of the dtype and device of the result.
        """
        ones = like.new_ones((like.shape[0], *self.shape))
        return ones if self.ignored is None else ones.masked_fill_(self._spread(self.ignored[tokens]), 0.0)

    def without_ignored(self, scale: T) -> T:
        """The gradients of the losses [N, *shape]: 0 for tokens that do not count, also where the mean over none made
        it infinite."""
        return scale if self.ignored is None else scale.masked_fill(self._spread(self.ignored), 0.0)

    def _spread(self, by_token: T) -> T:
        """[n] as [n, 1, ...], for values of the loss's shape."""
        return by_token.view(-1, *(1 for _ in self.shape))

    def scale_of_sum(self, scale: T) -> T:
        """The gradient of the sum, a scalar: 0 if no token counts, whose sum does not depend on anything."""
        return scale if self.ignored is None else scale.masked_fill(self.ignored.all(), 0.0)


class _OfLogits(Function):
    """Losses of logits that exist, chunk by chunk: of the size of the logits there is only their gradient."""

    @staticmethod
    def forward(ctx: Any, z: T, loss: TokenLoss) -> T:
        losses, saved = loss.new_losses(z, z.shape[0]), loss.new_saved(z, z.shape[0])
        for tokens in loss.chunks(z.shape[0]):
            stats = loss.statistics(z[tokens], tokens, True)
            losses[tokens] = loss.losses(stats, tokens)
            loss.save(saved, stats, tokens)
        ctx.loss = loss
        ctx.save_for_backward(z, *saved)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        z, *saved = ctx.saved_tensors
        loss, scale = ctx.loss, ctx.loss.without_ignored(grad)
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        for tokens in loss.chunks(z.shape[0]):
            stats = loss.restored(tuple(value[tokens] for value in saved))
            out[tokens] = loss.logits_gradient(z[tokens], stats, tokens, scale[tokens])
        return out, None


def losses_of_logits(logits: T, loss: TokenLoss) -> T:
    """Losses [N, *shape] of logits [..., V/P] that exist, of N tokens."""
    return _OfLogits.apply(logits.reshape(prod(logits.shape[:-1]), logits.shape[-1]), loss)
