"""Losses over a vocabulary: of logits that stay sharded over it, and of logits that are never held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.deferred_logits import DeferredLogits
from parallelize.head import over_data_axes
from parallelize.logits import linear_head, shard_of
from parallelize.ops.cross_entropy import token_losses, wanted
from parallelize.ops.vocabulary_softmax import working_dtype

T = torch.Tensor


def cross_entropy(
    logits: T,
    targets: T,
    *,
    mesh: DeviceMesh | None = None,
    weight: T | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_tokens: T | int | None = None,
) -> T:
    """Cross entropy of logits sharded over the vocabulary (or whole ones).

    Shapes (P = tp size):
        logits   [..., V] `ShardedLogits`, `DeferredLogits`, a DTensor `Shard(-1)`, or a plain whole tensor
        targets  [...]    full-vocabulary ids, or `ignore_index`; or floating [..., V], or this rank's [..., V/P]
        weight   [V]      of the classes, whole on each rank
        returns  a scalar, or [...] with reduction="none"

    Args:
        mesh: where it has data axes (dp_replicate, dp, dp_shard, cp), "mean" divides this rank's sum by the count of
            valid tokens (of their class weights; of all tokens for soft targets) over all of them: gradients are then to
            be summed over those axes, never averaged, and the sum of the returned values is the mean loss.
        z_loss: coefficient of the squared logsumexp (of the true one, not shifted by the maximum), whatever the weights.
        num_tokens: the count to divide by, where it is known better than from this batch (all microbatches).

    Cost: three all-reduces of one value a token forward, nothing backward; one scalar more for a mean over data axes.
    Raises: ShapeError `bad-targets`, `bad-reduction`, `bad-label-smoothing`, `bad-class-weight`, `bad-logits`.
    Source: softmax cross entropy with label smoothing as `torch.nn.CrossEntropyLoss`; z-loss, arXiv:2204.02311 sec. 5.
    """
    kept: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "weight": weight}
    if isinstance(logits, DeferredLogits) and (deferred := logits.deferred) is not None:
        return deferred.cross_entropy(
            targets, mesh=mesh, z_loss=z_loss, num_tokens=num_tokens, reduction=reduction, **kept
        )
    local, vocabulary = shard_of(logits)
    given = wanted(targets, tuple(local.shape[:-1]), vocabulary, working_dtype(local), reduction=reduction, **kept)
    losses = token_losses(local, given, vocabulary.group, z_loss)
    count = over_data_axes(given.divisor, mesh) if reduction == "mean" and num_tokens is None else num_tokens
    return given.reduced(losses, reduction, count)


def linear_cross_entropy(
    hidden: T,
    weight: T,
    targets: T,
    *,
    bias: T | None = None,
    mesh: DeviceMesh | None = None,
    class_weight: T | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_tokens: T | int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> T:
    """`cross_entropy` of `hidden @ weight.T + bias` that never holds more logits than those of one chunk of tokens.

    Shapes (P = tp size):
        hidden   [..., H]  plain, the same on every tp rank, or a replicated DTensor
        weight   [V, H]    plain, or a DTensor `Shard(0)` on the tp axis: gradients then arrive as DTensors
        bias     [V]       as the weight
        targets, class_weight, returns: as `cross_entropy` has them (its `weight` is `class_weight` here)

    Args:
        scale, softcap: the loss is of softcap * tanh(scale * z / softcap), as Gemma 2 has it; of scale * z without a cap.
        chunk: tokens of a chunk. Default: an eighth of them, at most H/4 (whose logits take a quarter of the memory of the
            weight's gradient), at least 128.

    Backward: for "mean" and "sum" gradients were made in the forward and are scaled; for "none" logits are made again.
    Cost: one all-gather of 4 values a token forward, in chunks; one all-reduce of the gradient of `hidden` backward.
    Memory: logits and softmax of one chunk; the gradients of weight and hidden from the forward on ("mean" and "sum").
    Raises: ShapeError `bad-head`, `bad-chunk`, `bad-targets`, `bad-reduction`, `bad-label-smoothing`,
        `bad-class-weight`.
    """
    hidden, head = linear_head(hidden, weight, bias, scale, softcap, chunk)
    return head.cross_entropy(
        hidden,
        targets,
        mesh=mesh,
        weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        num_tokens=num_tokens,
    )


def valid_tokens(targets: T, mesh: DeviceMesh | None = None, ignore_index: int = -100) -> T:
    """How many targets count, over all data axes of the mesh (one scalar all-reduce where there are any)."""
    return over_data_axes((targets != ignore_index).sum(), mesh)  # type: ignore[return-value]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """PyTorch's context of that name, for code that has it: safe to leave by an exception, and to nest."""
    from torch.distributed.tensor.parallel import loss_parallel as stock

    if private.loss_parallel_is_on():
        yield  # an outer one is in force
        return
    with stock():
        try:
            yield
        except BaseException:
            private.leave_loss_parallel()  # the stock context leaves its handlers behind here
            raise
