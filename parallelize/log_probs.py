"""Log-probabilities and entropies of tokens, with gradients: what preference and policy-gradient training is made of."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

import torch
from torch.autograd import Function

from parallelize.deferred_logits import DeferredLogits
from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.head import check_chosen
from parallelize.logits import linear_head, shard_of
from parallelize.ops.class_targets import HardTargets
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.cross_entropy import wanted
from parallelize.ops.linear_cross_entropy import Kept, logits_gradient
from parallelize.ops.vocabulary_softmax import cooled, statistics, working_dtype

T = torch.Tensor


def token_log_probs(logits: T, ids: T, *, temperature: float = 1.0, ignore_index: int = -100) -> T:
    """Log-probability of the chosen token at each place, with gradient.

    Shapes (P = tp size):
        logits   [..., V]  `ShardedLogits`, `DeferredLogits`, a DTensor `Shard(-1)`, or a plain whole tensor
        ids      [...]     full-vocabulary ids, or `ignore_index`, whose value is 0
        returns  [...]     log softmax(logits / temperature)[ids], in float32 at least

    Backward: grad ([c = id] - p_c) / temperature; nothing is sent. `DeferredLogits` are never held whole, either way.
    Cost: one all-gather of 4 values a token.
    Raises: ShapeError `bad-targets`, `id-out-of-range`, `bad-temperature`, `bad-logits`.
    """
    return _of_logits(logits, ids, temperature, ignore_index, entropy=False)[0]


def token_entropy(logits: T, *, temperature: float = 1.0) -> T:
    """Entropy of softmax(logits / temperature) at each place, with gradient: [..., V] -> [...], in nats.

    Logits of minus infinity have no part in it. Cost, forms of logits and errors: as `token_log_probs`.
    """
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _of_logits(logits, ids, temperature, -100, entropy=True)[1]  # type: ignore[return-value]


def token_log_probs_and_entropy(
    logits: T, ids: T, *, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[T, T]:
    """(`token_log_probs`, `token_entropy`) in one pass: one all-gather of 5 values a token, one gradient of the logits.

    Where an id is `ignore_index` both are 0.
    """
    return _of_logits(logits, ids, temperature, ignore_index, entropy=True)  # type: ignore[return-value]


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
    """(log-probabilities, entropies or None) of `hidden @ weight.T + bias`, of which one chunk of tokens is held at a time.

    Shapes, `scale`, `softcap`, `chunk`, errors: as `linear_cross_entropy`.
    Backward: each chunk's logits are made again, from statistics that were kept; one all-reduce of `hidden`'s gradient.
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
    check_chosen(ids)
    local, vocabulary = shard_of(logits)
    lead = tuple(local.shape[:-1])
    given = wanted(ids, lead, vocabulary, working_dtype(local), ignore_index=ignore_index, reduction="none")
    z = local.reshape(prod(lead), local.shape[-1])
    z = z if temperature == 1.0 else cooled(z, temperature)
    log_probs, entropies = _TokenStatistics.apply(z, given.targets, vocabulary.group, entropy)
    log_probs = log_probs.masked_fill(given.ignored, 0.0).view(lead)
    return log_probs, entropies.masked_fill(given.ignored, 0.0).view(lead) if entropy else None


class _TokenStatistics(Function):
    """(log-probabilities [N], entropies [N] or [0]) of logits [N, V/P]."""

    @staticmethod
    def forward(ctx: Any, z: T, targets: HardTargets, group: Group, entropy: bool):
        found = statistics(z, targets, group, moment=entropy)
        entropies = found.entropies if entropy else found.highest[:0].clone()
        ctx.targets, ctx.entropy = targets, entropy
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z, found.highest, found.log_total, found.mass, entropies)
        return found.losses.neg_(), entropies

    @staticmethod
    def backward(ctx: Any, grad: T | None, entropy_grad: T | None):
        refuse_double_backward()
        z, *saved = ctx.saved_tensors
        kept = Kept(*saved)
        scale = torch.zeros_like(kept.highest) if grad is None else -grad
        out = logits_gradient(z, kept, scale * kept.mass, entropy_grad if ctx.entropy else None)
        ctx.targets.subtract_(out, scale)
        return out.to(z.dtype), None, None, None


def _check_temperature(temperature: float) -> None:
    """Raises: ShapeError `bad-temperature`."""
    if not isinstance(temperature, (int, float)) or not isfinite(temperature) or temperature <= 0:
        raise ShapeError(Problem("bad-temperature", f"temperature is {temperature!r}", fix="a number above 0"))
