"""Values of whole sequences, whose tokens are on several ranks over `cp`: for losses of sequences, as preferences are.

A loss of a sequence is the same on every rank of `cp`. So is the gradient that it sends back, and each rank passes it
to its own tokens: the formula of one process has the gradients of one process. The loss of a step is divided by a count
over all ranks, in which those of `cp` count each sequence once more: there the gradient is their sum.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallelize.axes.vocabulary.loss.losses import token_log_probs
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import AnyMesh, MeshView
from parallelize.ops import collectives as ops

T = torch.Tensor


class _CountedSequences(threading.local):
    by_rank = False


_COUNTING = _CountedSequences()


@contextmanager
def counted_by_rank() -> Iterator[None]:
    """Inside, losses are divided by a count to which every rank of cp adds its sequences."""
    outer, _COUNTING.by_rank = _COUNTING.by_rank, True
    try:
        yield
    finally:
        _COUNTING.by_rank = outer


def sequence_sum(values: T, mesh: AnyMesh | None) -> T:
    """The sum of each sequence's values, over all ranks that have tokens of it.

    Args:
        values: [..., S], one number for each of this rank's tokens.
        mesh: its axis cp, if it has one, is summed over; None: a rank has whole sequences. Call it on every rank.

    Returns: [...], the same on every rank of cp, as a loss of it is. In a loop by hand, divide this by the number of
        sequences, or of pairs, over dp: its gradients are then those of one process. In the `loss=` of a step, let
        `count` be the number in the rows that it is given.
    Cost: forward, one all-reduce over cp of a value per sequence; in a step also one backward.
    """
    group = Group.alone() if mesh is None else MeshView.of(mesh).group("cp")
    total = values.sum(-1)
    return ops.sum_both(total, group) if _COUNTING.by_rank else ops.reduce(total, group)


def sequence_log_probs(
    logits: T,
    targets: T,
    mesh: AnyMesh | None,
    *,
    average: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> T:
    """The log-probability of each sequence, over all its targets: for preference losses (DPO, KTO, ORPO).

    Args:
        logits: [..., S, V], in the forms of `token_log_probs`.
        targets: [..., S], the id that follows each position, `ignore_index` where none counts (prompts, padding). With
            cp this rank's tokens, as the logits are.
        mesh: as in `sequence_sum`.
        average: divide by the number of targets of the sequence. One without targets has the value 0.
        temperature: divides the logits, in at least float32. A finite number above 0.
        ignore_index: the target of tokens that do not count.

    Returns: [...], in at least float32; as `sequence_sum`.
    Raises: as `token_log_probs`.
    Cost: that of `token_log_probs` and `sequence_sum`; with `average` another all-reduce of a value per sequence.
    """
    total = sequence_sum(token_log_probs(logits, targets, temperature=temperature, ignore_index=ignore_index), mesh)
    if not average:
        return total
    return total / sequence_sum((targets != ignore_index).to(total.dtype), mesh).clamp(min=1)
