"""Cross entropy of logits that are sharded over the vocabulary, or that are computed one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite, prod
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor.parallel import loss_parallel as stock_loss_parallel

from parallelize.axes.vocabulary.logits.deferred_logits import DeferredLogits, defer, logits_of
from parallelize.axes.vocabulary.logits.forms import (
    Head,
    autocast_inputs,
    check_token_ids,
    linear_head,
    shard_of,
    sum_over_data_axes,
)
from parallelize.axes.vocabulary.logits.sharded_logits import target_shard
from parallelize.base.errors import PlanError, Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import AnyMesh
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.vocabulary.class_targets import HardTargets, Vocabulary
from parallelize.ops.vocabulary.cross_entropy import prepare_targets, token_losses
from parallelize.ops.vocabulary.softmax import (
    SavedStatistics,
    logits_gradient,
    statistics,
    temperature_scaled,
    working_dtype,
)
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.forward_steps import PLANNED, add_step
from parallelize.state.guards.rank_means import marked_mean
from parallelize.state.records import applied, mark_applied, part_of

T = torch.Tensor


def cross_entropy(
    logits: T,
    targets: T,
    *,
    mesh: AnyMesh | None = None,
    weight: T | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_tokens: T | int | None = None,
) -> T:
    """Cross entropy of logits that are sharded over the vocabulary, or full.

    Args:
        logits: [..., V], as `ShardedLogits`, `DeferredLogits`, a DTensor `Shard(-1)` or a plain full tensor.
        targets: [...], ids of the full vocabulary, or `ignore_index`. Or class probabilities: floating [..., V], or
            this rank's shard [..., V/P] (P = tp size).
        mesh: if it has data axes (dp_replicate, dp, dp_shard, cp), "mean" divides this rank's sum by the global count:
            valid tokens over all of these axes (or the sum of their class weights; all tokens for class probabilities).
            Gradients must then be summed over these axes, not averaged. The sum of the returned values is the mean
            loss.
        weight: [V], class weights, in full on each rank.
        ignore_index: the target of tokens without a loss.
        label_smoothing: from 0 to 1, as in `torch.nn.CrossEntropyLoss`.
        z_loss: coefficient of the squared logsumexp (not shifted by the maximum). Class weights do not apply to it.
        reduction: "mean", "sum" or "none".
        num_tokens: the count to divide by for "mean", if this batch does not determine it (several microbatches).

    Returns: a scalar; [...] with reduction="none". In at least float32.
    Raises: ShapeError `bad-targets`, `id-out-of-range`, `bad-reduction`, `bad-label-smoothing`, `bad-class-weight`,
        `bad-logits`; ModelError as `DeferredLogits`. In backward, ModelError `mean-of-rank` for a mean without `mesh`
        and `num_tokens`, where gradients are summed over data ranks.
    Cost: forward, three all-reduces of one value per token over the tp group (four for class probabilities). Backward,
        none. A mean over data axes takes one scalar all-reduce. `DeferredLogits`: as `linear_cross_entropy`.
    Source: softmax cross entropy with label smoothing as `torch.nn.CrossEntropyLoss`; z-loss, arXiv:2204.02311 sec. 5.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "weight": weight}
    options["reduction"] = reduction
    if reduction == "mean" and mesh is None and num_tokens is None:
        return marked_mean(_cross_entropy(logits, targets, None, z_loss, None, **options))
    return _cross_entropy(logits, targets, mesh, z_loss, num_tokens, **options)


def _cross_entropy(
    logits: T, targets: T, mesh: AnyMesh | None, z_loss: float, num_tokens: T | int | None, **options: Any
) -> T:
    reduction, targets = options["reduction"], target_shard(targets, logits)
    if isinstance(logits, DeferredLogits) and (deferred := logits.deferred) is not None:
        return deferred.cross_entropy(targets, mesh=mesh, z_loss=z_loss, num_tokens=num_tokens, **options)
    local, vocabulary = shard_of(logits)
    prepared = prepare_targets(targets, tuple(local.shape[:-1]), vocabulary, working_dtype(local), **options)
    losses = token_losses(local, prepared, vocabulary.group, z_loss)
    count = num_tokens
    if reduction == "mean" and num_tokens is None:
        count = sum_over_data_axes(prepared.divisor, mesh)
    return prepared.reduced(losses, reduction, count)


def linear_cross_entropy(
    hidden: T,
    weight: T,
    targets: T,
    *,
    bias: T | None = None,
    mesh: AnyMesh | None = None,
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
    """`cross_entropy` of `hidden @ weight.T + bias`, with the logits of only one chunk of tokens in memory at a time.

    Args:
        hidden: [..., H], plain and the same on every tp rank, or a replicated DTensor.
        weight: [V, H], plain, or a DTensor `Shard(0)` on the tp axis; its gradient is then a DTensor.
        targets: as in `cross_entropy`.
        bias: [V], or None; plain or a DTensor like the weight.
        class_weight: the `weight` of `cross_entropy`.
        mesh, ignore_index, label_smoothing, z_loss, reduction, num_tokens: as in `cross_entropy`.
        scale: multiplies the logits.
        softcap: the logits are softcap * tanh(scale * z / softcap), as in Gemma 2; None: scale * z.
        chunk: tokens per chunk. None: an eighth of the tokens, at most H/4 (their logits then take a quarter of the
            memory of the weight's gradient), and at least 128; on CUDA H, where that needs no more memory
            (docs/vocabulary.md).

    Returns: as `cross_entropy`.
    Raises: ShapeError `bad-head`, `bad-chunk`, `bad-targets`, `id-out-of-range`, `bad-reduction`,
        `bad-label-smoothing`, `bad-class-weight`.
    Cost: forward, one all-gather of 4 values per token over the tp group, in chunks. Backward, one all-reduce of the
        gradient of `hidden`. For "mean" and "sum" the forward computes the gradients, and backward scales them; for
        "none" backward recomputes the logits.
    Memory: logits and softmax of one chunk; for "mean" and "sum" also the gradients of weight and hidden states, from
        the forward on.
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


def valid_tokens(targets: T, mesh: AnyMesh | None = None, ignore_index: int = -100) -> T:
    """The number of targets that are not `ignore_index`, over all data axes of the mesh: a global count.

    Args:
        targets: this rank's targets, of any shape.
        mesh: its data axes (dp_replicate, dp, dp_shard, cp) are summed over; None: this rank alone.
        ignore_index: the target of tokens without a loss.

    Returns: an int64 scalar tensor.
    Cost: one scalar all-reduce if the mesh has data axes.
    """
    return torch.as_tensor(sum_over_data_axes((targets != ignore_index).sum(), mesh))


@contextmanager
def loss_parallel() -> Iterator[None]:
    """`torch.distributed.tensor.parallel.loss_parallel` for existing code, safe to nest and to leave by an exception.

    Models with a plan do not need it: apply the plan with `loss_parallel=True`.

    Returns: a context manager.
    Cost: none to enter or leave. Inside, PyTorch's loss sends three all-reduces of one value per token over the tp
        group.
    """
    if private.loss_parallel_is_on():
        yield  # an outer context is active
        return
    with stock_loss_parallel():
        try:
            yield
        except BaseException:
            private.leave_loss_parallel()  # the stock context leaves its handlers behind here
            raise


# -- fuse loss -------------------------------------------------------------------------------------------------------
# Heads that defer their matmul to the loss (`fuse_loss`), with or without tensor parallelism.


def deferred_head(vocabulary: Vocabulary, sharded: bool) -> Callable:
    """The forward of a planned head. `sharded`: whether the computed logits stay sharded over the vocabulary."""

    def forward(self: Any, input: T) -> T:
        planned, parameters = self._applied.planned, self._parameters
        if planned.enter is not None:
            input = planned.enter(input)
        bias = None if planned.bias is None else planned.bias.local(parameters)
        return _deferred(self, input, planned.weight.local(parameters), bias, vocabulary, sharded)

    return forward


def wrong_heads(resolved: ResolvedPlan, model: ModelFacts) -> list[Problem]:
    """Heads whose forward is not that of `nn.Linear`."""
    return [
        Problem(
            "cannot-fuse-loss",
            f"{fqn} is a {type(model.objects[fqn]).__name__} with its own forward",
            row.rule.where,
            fix="apply the plan with fuse_loss=False, and use `parallelize.linear_cross_entropy` in your own loop",
        )
        for fqn, row in resolved.modules.items()
        if row.contract.defers_logits and not _is_linear(model.objects[fqn])
    ]


def watch_writes(head: nn.Module) -> None:
    """Watch the sharded weight of a head for writes while `fully_shard` replaces it with the gathered one."""
    weight: Any = head._parameters["weight"]
    with torch.no_grad():  # the local tensor too: foreach writes change only its version counter
        mark_applied(head, written_weight=(weight, weight.to_local()))


def mark_deferred(head: nn.Module) -> None:
    mark_applied(head, defers_logits=True)


def deferred_heads(module: nn.Module) -> list[str]:
    """Names of the modules whose matmul is deferred to the loss."""
    return [name for name, inner in module.named_modules() if applied(inner).defers_logits]


def fuse_heads(module: nn.Module, resolved: ResolvedPlan) -> None:
    """Make the heads that a plan names return `DeferredLogits`, in a model that is not sharded over `tp`. In place.

    Raises: PlanError `cannot-fuse-loss`.
    """
    local_facts = part_of(module, resolved.facts)
    local = resolved.restricted(local_facts)
    if problems := wrong_heads(local, local_facts):
        raise PlanError(*problems)
    for fqn, row in local.modules.items():
        head = local_facts.objects[fqn]
        if row.contract.defers_logits and head._parameters.get("weight") is not None:
            add_step(head, PLANNED, _plain_head)
            mark_deferred(head)


def _plain_head(self: Any, input: T) -> T:
    return _deferred(self, input, self.weight, self.bias, Vocabulary(self.weight.shape[0], _ALONE), False)


def _deferred(module: Any, input: T, weight: T, bias: T | None, vocabulary: Vocabulary, sharded: bool) -> T:
    hidden, cast, bias = autocast_inputs(input, weight, bias)
    head = Head(cast, bias, vocabulary)
    if torch.compiler.is_compiling():  # a traced graph cannot contain deferred logits
        return logits_of(hidden, head, sharded and not applied(module).gathers_logits)
    return defer(hidden, head, sharded, (module._parameters["weight"], *applied(module).written_weight))


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


_ALONE = Group.alone()


# -- log probs -------------------------------------------------------------------------------------------------------
# Log-probabilities and entropies of tokens, with gradients, for preference and policy-gradient training.


def token_log_probs(logits: T, ids: T, *, temperature: float = 1.0, ignore_index: int = -100) -> T:
    """Log-probability of a token at each position, differentiable with respect to the logits.

    Args:
        logits: [..., V], as `ShardedLogits`, `DeferredLogits`, a DTensor `Shard(-1)` or a plain full tensor. Of
            `DeferredLogits` only one chunk of tokens is in memory at a time, in forward and backward.
        ids: [...], ids of the full vocabulary. The value for `ignore_index` is 0.
        temperature: divides the logits, in at least float32. A finite number above 0.
        ignore_index: the id of positions without a token.

    Returns: [...], log softmax(logits / temperature)[ids], in at least float32.
    Raises: ShapeError `bad-targets`, `id-out-of-range`, `bad-temperature`, `bad-logits`; ModelError as
        `DeferredLogits`.
    Cost: forward, one all-gather of 4 values per token over the tp group. Backward, grad ([c = id] - p_c) / temperature
        without communication; for `DeferredLogits` one all-reduce of the gradient of the hidden states.
    """
    return _statistics_of_logits(logits, ids, temperature, ignore_index, entropy=False)[0]


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
    entropies = _statistics_of_logits(logits, ids, temperature, -100, entropy=True)[1]
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
    log_probs, entropies = _statistics_of_logits(logits, ids, temperature, ignore_index, entropy=True)
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
    Cost: forward, one all-gather of 4 values per token (5 with entropies). Backward, each chunk's logits are recomputed
        from saved statistics, and the gradient of `hidden` takes one all-reduce.
    """
    check_temperature(temperature)
    cap = None if softcap is None else softcap / temperature
    hidden, head = linear_head(hidden, weight, bias, scale / temperature, cap, chunk)
    log_probs, entropies = head.token_statistics(hidden, ids, ignore_index, entropy=entropy)
    return log_probs, entropies


def _statistics_of_logits(
    logits: T, ids: T, temperature: float, ignore_index: int, *, entropy: bool
) -> tuple[T, T | None]:
    check_temperature(temperature)
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


def check_temperature(temperature: float) -> None:
    """Raises: ShapeError `bad-temperature`."""
    if not isinstance(temperature, (int, float)) or not isfinite(temperature) or temperature <= 0:
        raise ShapeError(Problem("bad-temperature", f"temperature is {temperature!r}", fix="a number above 0"))
