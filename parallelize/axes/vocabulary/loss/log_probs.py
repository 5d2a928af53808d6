"""Log-probabilities and entropies of tokens, with gradients, for preference and policy-gradient training."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

import torch
from torch.autograd import Function

from parallelize.axes.vocabulary.logits.deferred_logits import DeferredLogits
from parallelize.axes.vocabulary.logits.forms import check_token_ids, linear_head, shard_of
from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.vocabulary.class_targets import HardTargets
from parallelize.ops.vocabulary.cross_entropy import prepare_targets
from parallelize.ops.vocabulary.softmax import (
    SavedStatistics,
    logits_gradient,
    statistics,
    temperature_scaled,
    working_dtype,
)

T = torch.Tensor


def token_log_probs(logits: T, ids: T, *, temperature: float = 1.0, ignore_index: int = -100) -> T:
    """Log-probability of a token at each position, differentiable with respect to the logits.

    Args:
        logits: [..., V], as `ShardedLogits`, `DeferredLogits`, a DTensor `Shard(-1)` or a plain full tensor. Of
            `DeferredLogits` only one chunk of tokens is in memory at a time, in forward and backward.
        ids: [...], ids of the full vocabulary. The value for `ignore_index` is 0.
        temperature: divides the logits, in at least float32. A finite number above 0.
        ignore_index: the id of positions without a token.

    Returns: [...], log softmax(logits / temperature)[ids], in at least float32.
    Raises: ShapeError `bad-targets`, `id-out-of-range`, `bad-temperature`, `bad-logits`; ModelError as `DeferredLogits`.
    Cost: forward, one all-gather of 4 values per token over the tp group. Backward, grad ([c = id] - p_c) / temperature
        without communication; for `DeferredLogits` one all-reduce of the gradient of the hidden states.
    """
    return _of_logits(logits, ids, temperature, ignore_index, entropy=False)[0]


def token_entropy(logits: T, *, temperature: float = 1.0) -> T:
    """Entropy of softmax(logits / temperature) at each position, in nats, differentiable with respect to the logits.

    Args:
        logits: [..., V], in the forms of `token_log_probs`. A logit of minus infinity adds 0.
        temperature: divides the logits. A finite number above 0.

    Returns: [...], in at least float32.
    Raises: ShapeError `bad-temperature`, `bad-logits`; ModelError as `DeferredLogits`.
    Cost: as `token_log_probs`, with 5 values per token.
    """
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    entropies = _of_logits(logits, ids, temperature, -100, entropy=True)[1]
    assert entropies is not None
    return entropies


def token_log_probs_and_entropy(
    logits: T, ids: T, *, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[T, T]:
    """(`token_log_probs`, `token_entropy`) in one pass over the logits.

    Args:
        logits, ids, temperature, ignore_index: as in `token_log_probs`.

    Returns: ([...], [...]), in at least float32. Both are 0 where an id is `ignore_index`.
    Raises: as `token_log_probs`.
    Cost: one all-gather of 5 values per token; one gradient of the logits for both.
    """
    log_probs, entropies = _of_logits(logits, ids, temperature, ignore_index, entropy=True)
    assert entropies is not None
    return log_probs, entropies


def linear_token_log_probs(
    hidden: T,
    weight: T,
    ids: T,
    *,
    bias: T | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[T, T | None]:
    """(log-probabilities, entropies or None) of `hidden @ weight.T + bias`, computed one chunk of tokens at a time.

    Args:
        hidden, weight, bias, scale, softcap, chunk: as in `linear_cross_entropy`.
        ids: [...], ids of the full vocabulary, or `ignore_index`.
        entropy: whether to compute entropies too.
        temperature: divides the logits, after scale and softcap. A finite number above 0.
        ignore_index: the id of positions without a token; both values are 0 there.

    Returns: ([...], [...] or None), in at least float32.
    Raises: ShapeError `bad-head`, `bad-chunk`, `bad-targets`, `id-out-of-range`, `bad-temperature`.
    Cost: forward, one all-gather of 4 values per token (5 with entropies). Backward, each chunk's logits are recomputed from
        saved statistics, and the gradient of `hidden` takes one all-reduce.
    """
    _check_temperature(temperature)
    cap = None if softcap is None else softcap / temperature
    hidden, head = linear_head(hidden, weight, bias, scale / temperature, cap, chunk)
    log_probs, entropies = head.token_statistics(hidden, ids, ignore_index, entropy=entropy)
    return log_probs, entropies


def _of_logits(logits: T, ids: T, temperature: float, ignore_index: int, *, entropy: bool) -> tuple[T, T | None]:
    _check_temperature(temperature)
    if isinstance(logits, DeferredLogits) and (deferred := logits.deferred) is not None:
        return deferred.token_statistics(ids, ignore_index, temperature, entropy=entropy)
    check_token_ids(ids)
    local, vocabulary = shard_of(logits)
    lead = tuple(local.shape[:-1])
    prepared = prepare_targets(ids, lead, vocabulary, working_dtype(local), ignore_index=ignore_index, reduction="none")
    assert prepared.ignored is not None
    z = local.reshape(prod(lead), local.shape[-1])
    z = z if temperature == 1.0 else temperature_scaled(z, temperature)
    log_probs, entropies = _TokenStatistics.apply(z, prepared.targets, vocabulary.group, entropy)
    log_probs = log_probs.masked_fill(prepared.ignored, 0.0).view(lead)
    return log_probs, entropies.masked_fill(prepared.ignored, 0.0).view(lead) if entropy else None


class _TokenStatistics(Function):
    """(log-probabilities [N], entropies [N] or [0]) of logits [N, V/P]."""

    @staticmethod
    def forward(ctx: Any, z: T, targets: HardTargets, group: Group, entropy: bool):
        stats = statistics(z, targets, group, moment=entropy)
        entropies = stats.entropies if entropy else stats.highest[:0].clone()
        ctx.targets, ctx.entropy = targets, entropy
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z, stats.highest, stats.log_total, stats.mass, entropies)
        return stats.losses.neg_(), entropies

    @staticmethod
    def backward(ctx: Any, grad: T | None, entropy_grad: T | None):
        refuse_double_backward()
        z, *values = ctx.saved_tensors
        saved = SavedStatistics(*values)
        scale = torch.zeros_like(saved.highest) if grad is None else -grad
        of_entropy = entropy_grad if ctx.entropy else None
        out = logits_gradient(z, ctx.targets, saved, scale, scale * saved.mass, of_entropy)
        return out.to(z.dtype), None, None, None


def _check_temperature(temperature: float) -> None:
    """Raises: ShapeError `bad-temperature`."""
    if not isinstance(temperature, (int, float)) or not isfinite(temperature) or temperature <= 0:
        raise ShapeError(Problem("bad-temperature", f"temperature is {temperature!r}", fix="a number above 0"))
