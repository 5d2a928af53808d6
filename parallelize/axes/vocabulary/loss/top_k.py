"""The most probable entries of a teacher, and losses and log-probabilities of a student at those alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from parallelize.axes.vocabulary.logits.token_rows import TokenRows
from parallelize.axes.vocabulary.loss.distillation import (
    CountedTokens,
    compare_targets,
    counted_tokens,
    divergence_named,
    reduced_divergence,
)
from parallelize.axes.vocabulary.loss.losses import check_temperature
from parallelize.axes.vocabulary.loss.teacher_logits import entries_of, refuse_gradient
from parallelize.axes.vocabulary.sampling.candidates import Candidates, keep_top_k
from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import AnyMesh
from parallelize.ops.vocabulary.chosen_entries import ChosenLogProbs, chosen_positions
from parallelize.ops.vocabulary.class_targets import Vocabulary, check_ids

T = torch.Tensor
_MOST_MASS = 1.1  # of rounded log-probabilities that are said to be part of a distribution


def top_k_log_probs(
    logits: T, k: int, *, tail: bool = False, temperature: float = 1.0, vocab_size: int | None = None
) -> tuple[T, T]:
    """The k most probable entries of each position, with their log-probabilities over the whole vocabulary.

    For a teacher: what `top_k_distillation_loss` takes, to store or to send. Without gradients.

    Args:
        logits: [..., V], as `ShardedLogits`, `DeferredLogits` (in chunks of tokens), a DTensor `Shard(-1)` or full.
        k: from 1 to V.
        tail: whether to return the log of the mass of all other entries too, in a column of its own.
        temperature: divides the logits, in at least float32. A finite number above 0.
        vocab_size: the entries that have a meaning, from id 0 on; those behind them have no probability. None: all.

    Returns: (ids [..., k] int64, log-probabilities [..., k] in at least float32, with `tail` [..., k + 1]), the most
        probable first; of equal logits the lowest ids. The same on every rank of tp.
    Raises: ShapeError `bad-top-k`, `bad-temperature`, `bad-logits`, `other-vocabulary`; ModelError `teacher-gradient`
        if the logits require a gradient and gradients are on; as `DeferredLogits`.
    Cost: per token and rank, an all-gather of min(k, V/P) pairs of 16 bytes, and one of k + 4 values.
    """
    check_temperature(temperature)
    rows = TokenRows.of(logits)
    refuse_gradient(rows)
    entries = entries_of(vocab_size, rows.vocabulary.full)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= entries:
        raise ShapeError(Problem("bad-top-k", f"k is {k!r}, of {entries:,} entries", fix=f"from 1 to {entries}"))
    ids = torch.empty((rows.count, k), dtype=torch.long, device=rows.flat.device)
    columns = k + 1 if tail else k
    log_probs = torch.empty((rows.count, columns), dtype=rows.working_dtype, device=rows.flat.device)
    with torch.no_grad():
        for start in range(0, rows.count, rows.chunk):
            tokens = slice(start, min(rows.count, start + rows.chunk))
            z = rows.logits(tokens)
            ids[tokens] = _highest(z, rows.vocabulary, k, entries)
            loss = _chosen(rows, ids[tokens], None, temperature, entries, tail)
            values = loss.losses(loss.statistics(z, slice(None), True), slice(None))
            order = values[:, :k].sort(stable=True, dim=-1, descending=True).indices
            ids[tokens] = ids[tokens].gather(1, order)
            log_probs[tokens] = torch.cat((values.gather(1, order), values[:, k:]), 1)
    return ids.view(*rows.lead, k), log_probs.view(*rows.lead, columns)


def candidate_log_probs(
    logits: T, ids: T, *, temperature: float = 1.0, ignore_index: int = -100, vocab_size: int | None = None
) -> T:
    """Log-probabilities of several entries of each position, differentiable with respect to the logits.

    Args:
        logits: [..., V], in the forms of `token_log_probs`.
        ids: [..., k], ids of the full vocabulary, no two of a position alike. The value for `ignore_index` is 0.
        temperature: divides the logits, in at least float32. A finite number above 0.
        ignore_index: the id of an absent entry, where positions have fewer than k.
        vocab_size: as in `distillation_loss`.

    Returns: [..., k], log softmax(logits / temperature) at the ids, in at least float32.
    Raises: ShapeError `bad-targets`, `id-out-of-range`, `bad-temperature`, `bad-logits`, `other-vocabulary`; ModelError
        as `DeferredLogits`.
    Cost: forward, one all-gather of k + 2 values per token over the tp group. Backward, none; `DeferredLogits` compute
        each chunk's logits again, and take one all-reduce of the gradient of the hidden states.
    """
    rows = TokenRows.of(logits)
    flat, absent = _checked_ids(rows, ids, ignore_index, vocab_size)
    values = _values(rows, flat, absent, temperature, vocab_size, others=False)
    return values.view(*rows.lead, ids.shape[-1])


def top_k_distillation_loss(
    student_logits: T,
    ids: T,
    log_probs: T,
    *,
    tail: bool = True,
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
    """`distillation_loss` from a teacher's k most probable entries of each position, as of a file or another process.

    Args:
        student_logits: [..., V], in the forms of `distillation_loss`.
        ids: [..., k], the teacher's entries, no two of a position alike; `ignore_index` for absent ones.
        log_probs: [..., k], the teacher's log-probabilities of these, at this `temperature`. Or [..., k + 1], with the
            log of the mass of all other entries behind them. Without `tail` they may be logits, divided by the
            temperature.
        tail: True compares distributions over k + 1 classes: the entries, and all others as one. False compares the two
            distributions among the k entries, which leave open how probable those are together. Where the others' mass
            is not given it is 1 minus that of the entries, but not less than what their dtype can tell from 0.
        divergence, beta, targets, token_weight, vocab_size, mesh, num_tokens, reduction: as in `distillation_loss`.
        temperature: divides the student's logits.
        ignore_index: of `targets`, and of `ids`. A position without entries does not count.

    Returns: as `distillation_loss`.
    Raises: as `distillation_loss`; ShapeError `bad-targets`, `id-out-of-range`, and `bad-teacher` for log-probabilities
        of another shape, or with a tail of more mass than 1 (logits).
    Cost: forward, one all-gather of k + 4 values per token over the tp group (k + 2 without `tail`). Backward, as
        `candidate_log_probs`.
    Source: as `distillation_loss`, of the coarser distribution, whose divergence is at most the full one.
    """
    kind = divergence_named(divergence, beta, 1.0)
    rows = TokenRows.of(student_logits)
    flat, absent = _checked_ids(rows, ids, ignore_index, vocab_size)
    teacher = _teacher_classes(rows, ids, log_probs, absent, tail, entries_of(vocab_size, rows.vocabulary.full))
    student = _values(rows, flat, absent, temperature, vocab_size, others=tail)
    if absent is not None:
        student = student.masked_fill(F.pad(absent, (0, int(tail))), -torch.inf)
    counted = counted_tokens(rows, targets, ignore_index, token_weight)
    if absent is not None:
        counted = counted.without(absent.all(-1))
    return reduced_divergence(
        _whole(student, counted), _whole(teacher, counted), kind, counted, None, mesh, num_tokens, reduction
    )


def _whole(classes: T, counted: CountedTokens) -> TokenRows:
    """Log-probabilities of a few classes [N, c], as logits that every rank has."""
    return TokenRows(classes, None, Vocabulary(classes.shape[1], _ALONE), counted.lead)


def _teacher_classes(rows: TokenRows, ids: T, log_probs: T, absent: T | None, tail: bool, entries: int) -> T:
    """[N, k], or [N, k + 1] with the tail. Raises: ShapeError `bad-teacher`; ModelError `teacher-gradient`."""
    k = ids.shape[-1]
    allowed = [(*ids.shape[:-1], columns) for columns in (k, k + 1)]
    if tuple(log_probs.shape) not in allowed or not log_probs.is_floating_point():
        what = f"log-probabilities {list(log_probs.shape)} ({log_probs.dtype}) of ids {list(ids.shape)}"
        raise ShapeError(Problem("bad-teacher", what, fix="one number for each id, and maybe one for all others"))
    flat = log_probs.reshape(rows.count, -1).to(torch.promote_types(rows.working_dtype, log_probs.dtype))
    refuse_gradient(TokenRows(flat, None, Vocabulary(flat.shape[1], _ALONE), rows.lead))
    if absent is not None:
        flat = flat.masked_fill(F.pad(absent, (0, flat.shape[1] - k)), -torch.inf)
    if not tail:
        return flat[:, :k]
    mass = flat.exp().sum(-1, keepdim=True)
    _check_all(mass <= _MOST_MASS, lambda: _too_much(mass))
    if flat.shape[1] > k:
        return flat
    others = (1.0 - mass).clamp(min=torch.finfo(log_probs.dtype).eps)
    if k >= entries:  # a position that names all entries leaves none
        number = k if absent is None else k - absent.sum(-1, keepdim=True)
        others = others.masked_fill(torch.as_tensor(number >= entries, device=others.device), 0.0)
    return torch.cat((flat, others.log()), -1)


def _too_much(mass: T) -> ShapeError:
    what = f"the log-probabilities of one position have a mass of {float(mass.max()):.4g} together"
    fix = "logits have no tail: take log_softmax over the whole vocabulary (`top_k_log_probs`), or pass tail=False"
    return ShapeError(Problem("bad-teacher", what, fix=fix))


def _checked_ids(rows: TokenRows, ids: T, ignore_index: int, vocab_size: int | None) -> tuple[T, T | None]:
    """(ids [N, k] with 0 for absent ones, which are absent [N, k] or None).

    Raises: ShapeError `bad-targets`, `id-out-of-range`, `other-vocabulary`.
    """
    if ids.is_floating_point() or ids.ndim != len(rows.lead) + 1 or tuple(ids.shape[:-1]) != rows.lead:
        what = f"ids {list(ids.shape)} ({ids.dtype}) for logits of tokens {list(rows.lead)}"
        raise ShapeError(Problem("bad-targets", what, fix="k integers per token"))
    compare_targets(rows.vocabulary, {"ids": ids})
    flat = ids.reshape(rows.count, ids.shape[-1]).long()
    absent: T | None = flat == ignore_index
    if flat.device.type == "cpu" and not (flat == ignore_index).any():
        absent = None  # on an accelerator, the host would wait for this
    known = flat if absent is None else flat.masked_fill(absent, 0)
    check_ids(known, entries_of(vocab_size, rows.vocabulary.full), "ids")
    ordered = flat.sort(-1).values
    alike = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != ignore_index)
    _check_all(~alike, lambda: _twice(ordered[:, 1:][alike]))
    return known, absent


def _twice(ids: T) -> ShapeError:
    fix = f"each id once; {-100} (`ignore_index`) for entries that a position does not have"
    return ShapeError(Problem("bad-targets", f"id {int(ids[0])} is twice among those of a position", fix=fix))


def _check_all(condition: T, error: Callable[[], ShapeError]) -> None:
    """Raise an error unless all are true; on an accelerator, an asynchronous assertion."""
    if condition.is_meta or torch.compiler.is_compiling() or not condition.numel():
        return
    if condition.device.type != "cpu":
        torch._assert_async(condition.all())
    elif not condition.all():
        raise error()


def _values(
    rows: TokenRows, ids: T, absent: T | None, temperature: float, vocab_size: int | None, *, others: bool
) -> T:
    """[N, k], or [N, k + 1] with the log of the mass of all others."""
    check_temperature(temperature)
    return rows.losses(_chosen(rows, ids, absent, temperature, entries_of(vocab_size, rows.vocabulary.full), others))


def _chosen(
    rows: TokenRows, ids: T, absent: T | None, temperature: float, entries: int, others: bool
) -> ChosenLogProbs:
    vocabulary = rows.vocabulary
    width = max(0, min(vocabulary.stop, entries) - vocabulary.start)
    local, outside = chosen_positions(ids, vocabulary.start, width, absent)
    return ChosenLogProbs(
        local,
        outside,
        absent,
        others,
        width,
        float(temperature),
        vocabulary.group,
        rows.chunk,
        rows.working_dtype,
        rows.tail,
    )


def _highest(z: T, vocabulary: Vocabulary, k: int, entries: int) -> T:
    """The ids [n, k] of the highest of these logits [n, V/P], in their own order."""
    if k == entries:
        return torch.arange(k, device=z.device).expand(z.shape[0], k)
    z = z.clone()
    z[:, max(0, entries - vocabulary.start) :] = -torch.inf
    return keep_top_k(Candidates.of(z, vocabulary), k).ids


_ALONE = Group.alone()
