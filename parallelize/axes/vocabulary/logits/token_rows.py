"""Logits of N tokens, whatever form they have: those that exist, and those that a head computes chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from parallelize.axes.vocabulary.logits.deferred_logits import DeferredLogits
from parallelize.axes.vocabulary.logits.forms import Head, check_head, linear_head, shard_of
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.ops.vocabulary.linear_cross_entropy import (
    check_storage,
    default_chunk,
    linear_losses,
    without_autocast,
)
from parallelize.ops.vocabulary.softmax import working_dtype
from parallelize.ops.vocabulary.token_losses import TokenLoss, losses_of_logits

T = torch.Tensor
_FEWEST = 128  # tokens of a chunk, as in `default_chunk`


@dataclass(frozen=True)
class TokenRows:
    """Logits [..., V] of N tokens.

    Attributes:
        flat: [N, V/P] logits that exist, or [N, H] the hidden states of a head.
        head: the head, or None.
        vocabulary: what this rank has of it.
        lead: the shape [...] of the tokens.
    """

    flat: T
    head: Head | None
    vocabulary: Vocabulary
    lead: tuple[int, ...]

    @staticmethod
    def of(logits: T) -> TokenRows:
        """Of logits in any form. Raises: ShapeError `bad-logits`, `bad-head`; ModelError as `DeferredLogits`."""
        if isinstance(logits, DeferredLogits) and (deferred := logits.deferred) is not None:
            hidden, head = deferred.computed_by()
            return TokenRows.of_head(hidden, head)
        local, vocabulary = shard_of(logits)
        return TokenRows(_flat(local), None, vocabulary, tuple(local.shape[:-1]))

    @staticmethod
    def of_head(hidden: T, head: Head) -> TokenRows:
        """Of hidden states [..., H] under a head. Raises: ShapeError `bad-head`, `bad-chunk`."""
        check_head(head, hidden)
        return TokenRows(_flat(hidden), head, head.vocabulary, tuple(hidden.shape[:-1]))

    @staticmethod
    def of_linear(hidden: T, weight: T, bias: T | None, scale: float, softcap: float | None, chunk: int | None):
        """Of `linear_cross_entropy`'s arguments."""
        return TokenRows.of_head(*linear_head(hidden, weight, bias, scale, softcap, chunk))

    @property
    def count(self) -> int:
        return self.flat.shape[0]

    @property
    def working_dtype(self) -> torch.dtype:
        """The dtype of the logits, at least float32."""
        return working_dtype(self.flat) if self.head is None else self.head.working_dtype

    @property
    def requires_grad(self) -> bool:
        """Whether something that the logits depend on does; of a head its hidden states, as parameters often do."""
        return self.flat.requires_grad

    @property
    def chunk(self) -> int:
        """Tokens whose logits, or temporaries of their size, exist at the same time: the same on every rank."""
        if self.head is None:
            return max(_FEWEST, -(-self.count // 8))
        return self.head.chunk if self.head.chunk is not None else default_chunk(self.flat, self.head.weight)

    @property
    def version(self) -> int:
        """Counts the writes to what the logits are computed from, as far as PyTorch counts them."""
        used = (self.flat,) if self.head is None else (self.flat, self.head.weight)
        return sum(x._version for x in used if not x.is_inference())

    def logits(self, tokens: slice) -> T:
        """This rank's logits [n, V/P] of some tokens, without a graph. Raises: ModelError `weight-let-go`."""
        with torch.no_grad(), without_autocast(self.flat):
            rows = self.flat[tokens].detach()
            if self.head is None:
                return rows
            check_storage(self.head.weight, "before the logits of a chunk of tokens were computed")
            return self.head.detached().logits(rows)

    def losses(self, loss: TokenLoss, *, total: bool = False) -> T:
        """The losses [N, *shape], differentiable with respect to logits, hidden states and head; with `total`
        their sum, whose gradient is computed in the forward where a head computes the logits."""
        if self.head is None:
            losses = losses_of_logits(self.flat, loss)
            return losses.sum() if total else losses
        return linear_losses(self.flat, self.head.weight, self.head.bias, loss, total=total)[0]

    @property
    def tail(self) -> Callable[[T], Any] | None:
        """The elementwise function behind the matmul of a head."""
        return None if self.head is None else self.head.tail


def _flat(x: T) -> T:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])
