"""Distillation: divergences of a student's and a teacher's distribution over the whole vocabulary.

The logits of either side may be full, sharded, or not computed yet. Nothing of their size is stored but what exists
already, and the gradient of the student's logits where these exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallelize.axes.vocabulary.logits.forms import sum_over_data_axes
from parallelize.axes.vocabulary.logits.row_functions import same_layout
from parallelize.axes.vocabulary.logits.token_rows import TokenRows
from parallelize.axes.vocabulary.loss.losses import check_temperature
from parallelize.axes.vocabulary.loss.teacher_logits import teacher_of
from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.mesh_view import AnyMesh
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.ops.vocabulary.cross_entropy import check_reduction, mean_over
from parallelize.ops.vocabulary.divergence import DIVERGENCES, JSD, Divergence, DivergenceLoss
from parallelize.state.guards.rank_means import marked_mean

T = torch.Tensor


def distillation_loss(
    student_logits: T,
    teacher_logits: T,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    targets: T | None = None,
    ignore_index: int = -100,
    token_weight: T | None = None,
    vocab_size: int | None = None,
    mesh: AnyMesh | None = None,
    num_tokens: T | float | None = None,
    reduction: str = "mean",
) -> T:
    """The divergence of a student's and a teacher's distribution at each position, over the whole vocabulary.

    Args:
        student_logits: [..., V], as `ShardedLogits`, `DeferredLogits`, a DTensor `Shard(-1)` or a plain full tensor. Of
            `DeferredLogits` only one chunk of tokens is in memory at a time, in forward and backward.
        teacher_logits: [..., V], of the same tokens as this rank's student, in any of these forms. They may be sharded
            over another group than the student's, as of a teacher on another mesh, whose ranks must then have the same
            tokens. They have no gradient.
        divergence: with p the teacher's probabilities and q the student's, "forward_kl" is KL(p || q), "reverse_kl"
            KL(q || p), and "jsd" beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.
        beta: of "jsd", above 0 and below 1.
        temperature: divides the logits of both sides, in at least float32. The loss is not multiplied by its square, as
            Hinton et al. do to keep the size of the gradient.
        targets: [...], integers; positions where they are `ignore_index` do not count. None: all do.
        token_weight: [...], multiplies the loss of each position; no gradient. None: 1.
        vocab_size: the entries that have a meaning, from id 0 on. Logits behind them, which pad a vocabulary, have no
            probability and no gradient. Needed if the numbers of logits differ.
        mesh: if it has data axes, "mean" divides this rank's sum by the global count, as in `cross_entropy`.
        num_tokens: what "mean" divides by, if this batch does not determine it (several microbatches).
        reduction: "mean" divides by the number of positions that count, or by the sum of their weights; "sum"; "none".

    Returns: a scalar; [...] with reduction="none", 0 at positions that do not count. In at least float32.
    Raises: ShapeError `bad-teacher`, `other-vocabulary`, `bad-divergence`, `bad-temperature`, `bad-targets`,
        `bad-token-weight`, `bad-reduction`, `bad-logits`; ModelError `teacher-gradient` for a teacher that requires a
        gradient, as `DeferredLogits`; in backward `teacher-changed`, and `mean-of-rank` as `cross_entropy`;
        HandshakeError `replicas-differ` for targets that differ over the tp group of either side, see `InputCheck`.
    Cost: forward, all-gathers of 4 and of 1 value per token ("jsd": 2) over the student's tp group, in chunks. Backward
        none; for `DeferredLogits` one all-reduce of the gradient of the hidden states. A teacher that is sharded
        with other bounds sends its logits: once, or also in the backward that computes them again.
    Source: Hinton et al., arXiv:1503.02531; Agarwal et al. (GKD), arXiv:2306.13649 sec. 2.
    """
    student, teacher = TokenRows.of(student_logits), TokenRows.of(teacher_logits)
    kind = divergence_named(divergence, beta, temperature)
    counted = counted_tokens(student, targets, ignore_index, token_weight)
    _compare_over_teacher(student, teacher, targets)
    return reduced_divergence(student, teacher, kind, counted, vocab_size, mesh, num_tokens, reduction)


def linear_distillation_loss(
    hidden: T,
    weight: T,
    teacher_hidden: T,
    teacher_weight: T,
    *,
    bias: T | None = None,
    teacher_bias: T | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    targets: T | None = None,
    ignore_index: int = -100,
    token_weight: T | None = None,
    vocab_size: int | None = None,
    mesh: AnyMesh | None = None,
    num_tokens: T | float | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
    softcap: float | None = None,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
    chunk: int | None = None,
) -> T:
    """`distillation_loss` of two heads, with the logits of only one chunk of tokens of both in memory at a time.

    Args:
        hidden: [..., H], plain and the same on every tp rank, or a replicated DTensor.
        weight, bias: [V, H] and [V], as in `linear_cross_entropy`.
        teacher_hidden: [..., H'] of the same tokens; it must not require a gradient.
        teacher_weight, teacher_bias: [V, H'] and [V], plain or DTensors, of any group. Read without their gradients.
        divergence, beta, temperature, targets, ignore_index, token_weight, vocab_size, mesh, num_tokens, reduction: as
            in `distillation_loss`.
        scale, softcap: of the student's logits, as in `linear_cross_entropy`; before the temperature.
        teacher_scale, teacher_softcap: of the teacher's.
        chunk: tokens per chunk. None: as in `linear_cross_entropy`.

    Returns: as `distillation_loss`.
    Raises: as `distillation_loss`, and ShapeError `bad-head`, `bad-chunk`.
    Cost: as `distillation_loss` of `DeferredLogits`. For "mean" and "sum" the forward computes the gradients, and both
        matmuls of a chunk run once; for "none" backward computes both sides' logits again.
    Memory: logits and log-probabilities of one chunk, of both sides; for "mean" and "sum" also the gradients of weight
        and hidden states, from the forward on.
    """
    with _naming("student"):
        student = TokenRows.of_linear(hidden, weight, bias, scale, softcap, chunk)
    with _naming("teacher"):
        constant, shift = _constant(teacher_weight), _constant(teacher_bias)
        teacher = TokenRows.of_linear(teacher_hidden, constant, shift, teacher_scale, teacher_softcap, chunk)
    kind = divergence_named(divergence, beta, temperature)
    counted = counted_tokens(student, targets, ignore_index, token_weight)
    return reduced_divergence(student, teacher, kind, counted, vocab_size, mesh, num_tokens, reduction)


def _constant(x: Any) -> Any:
    return x.detach() if isinstance(x, T) else x


@contextmanager
def _naming(side: str) -> Iterator[None]:
    """Say which head an error is about."""
    try:
        yield
    except ShapeError as error:
        raise ShapeError(
            *(replace(problem, what=f"the {side}'s {problem.what}") for problem in error.problems)
        ) from None


def reduced_divergence(
    student: TokenRows,
    teacher: TokenRows,
    kind: Divergence,
    counted: CountedTokens,
    vocab_size: int | None,
    mesh: AnyMesh | None,
    num_tokens: T | float | None,
    reduction: str,
) -> T:
    check_reduction(reduction)
    source = teacher_of(student, teacher, vocab_size)
    dtype = torch.promote_types(student.working_dtype, teacher.working_dtype)
    weights = None if counted.weights is None else counted.weights.to(dtype)
    loss = DivergenceLoss(
        kind,
        source,
        source.width,
        weights,
        counted.ignored,
        student.vocabulary.group,
        student.chunk,
        dtype,
        student.tail,
    )
    losses = student.losses(loss, total=reduction != "none")
    return counted.reduced(losses, reduction, mesh, num_tokens)


# -- positions that count --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedTokens:
    """Which of N tokens count in a loss, and how much.

    Attributes:
        ignored: [N], or None if all count.
        weights: [N], 0 for ignored tokens, or None for 1.
        lead: the shape [...] of the tokens.
        number: N.
    """

    ignored: T | None
    weights: T | None
    lead: tuple[int, ...]
    number: int

    def without(self, ignored: T) -> CountedTokens:
        """Without further tokens, [N]."""
        weights = None if self.weights is None else self.weights.masked_fill(ignored, 0.0)
        return replace(self, ignored=ignored if self.ignored is None else self.ignored | ignored, weights=weights)

    @property
    def divisor(self) -> T | int:
        """What a mean divides by."""
        if self.weights is not None:
            return self.weights.sum()
        return self.number if self.ignored is None else (~self.ignored).sum()

    def reduced(self, losses: T, reduction: str, mesh: AnyMesh | None, num_tokens: T | float | None) -> T:
        """[N] weighted losses as [...], or their sum as a sum or mean."""
        if reduction != "mean":
            return losses.view(self.lead) if reduction == "none" else losses
        if num_tokens is None and mesh is None:
            return marked_mean(mean_over(losses, self.divisor))
        return mean_over(losses, sum_over_data_axes(self.divisor, mesh) if num_tokens is None else num_tokens)


def counted_tokens(rows: TokenRows, targets: T | None, ignore_index: int, token_weight: T | None) -> CountedTokens:
    """Raises: ShapeError `bad-targets`, `bad-token-weight`; HandshakeError `replicas-differ`, see `InputCheck`."""
    compare_targets(rows.vocabulary, {"targets": targets, "token_weight": token_weight})
    ignored = None
    if targets is not None:
        if targets.dtype == torch.bool:
            what = "targets are a mask, and each of its positions would count"
            fix = f"targets are ids, {ignore_index} where a position does not count; a mask: token_weight=mask"
            raise ShapeError(Problem("bad-targets", what, fix=fix))
        if tuple(targets.shape) != rows.lead or targets.is_floating_point():
            what = f"targets {list(targets.shape)} ({targets.dtype}) for logits of tokens {list(rows.lead)}"
            raise ShapeError(Problem("bad-targets", what, fix="one integer per token"))
        ignored = (targets == ignore_index).reshape(-1)
    if token_weight is None:
        return CountedTokens(ignored, None, rows.lead, rows.count)
    if tuple(token_weight.shape) != rows.lead or token_weight.is_complex():
        what = f"token weights {list(token_weight.shape)} for logits of tokens {list(rows.lead)}"
        raise ShapeError(Problem("bad-token-weight", what, fix="one number per token, or None"))
    if token_weight.requires_grad:
        what, fix = "token weights have no gradient here", '`.detach()`, or multiply the losses of reduction="none"'
        raise ShapeError(Problem("bad-token-weight", what, fix=fix))
    weights = token_weight.reshape(-1).to(rows.working_dtype)
    return CountedTokens(
        ignored, weights if ignored is None else weights.masked_fill(ignored, 0.0), rows.lead, rows.count
    )


def compare_targets(vocabulary: Vocabulary, named: dict[str, Any]) -> None:
    compared = {name: value for name, value in named.items() if value is not None}
    if vocabulary.targets is not None and compared:
        vocabulary.targets.compare("targets", compared, torch.is_grad_enabled())


def _compare_over_teacher(student: TokenRows, teacher: TokenRows, targets: T | None) -> None:
    """Compare targets over the teacher's ranks too: those that gather its logits must have the same tokens.

    Raises: HandshakeError `replicas-differ`.
    """
    if not same_layout(student.vocabulary, teacher.vocabulary):
        compare_targets(teacher.vocabulary, {"targets": targets})


def divergence_named(name: str, beta: float, temperature: float) -> Divergence:
    """Raises: ShapeError `bad-divergence`, `bad-temperature`."""
    check_temperature(temperature)
    if name not in DIVERGENCES:
        raise ShapeError(Problem("bad-divergence", f"divergence is {name!r}", fix="one of " + ", ".join(DIVERGENCES)))
    if name == JSD and (not isinstance(beta, (int, float)) or not 0.0 < beta < 1.0):
        fix = 'a number between 0 and 1; where TRL has 0 or 1, divergence="forward_kl" or "reverse_kl"'
        raise ShapeError(Problem("bad-divergence", f"beta is {beta!r}", fix=fix))
    return Divergence(name, float(beta), float(temperature))
