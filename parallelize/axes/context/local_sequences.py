"""Split and gather sequences that are not inputs of the model: targets, embeddings, logits."""

from __future__ import annotations

from typing import Any

import torch

from parallelize.axes.context.forward_state import Context, context_of
from parallelize.axes.context.gathered_modules import gather_tokens
from parallelize.axes.context.inputs import next_tokens, select_tokens
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.wrapped_models import module_of
from parallelize.state.records import inside_adapters

T = torch.Tensor

__all__ = ["gather_sequence", "local_targets", "next_tokens", "split_sequence"]


def split_sequence(model: Any, x: T, dim: int = 1) -> T:
    """This rank's tokens of full sequences, as in a call of the model.

    Args:
        model: a module on `cp`, or a `ParallelModel`. Without cp, `x` is returned.
        x: [.., S, ..], the same on every rank of cp.
        dim: dimension of the tokens.

    Returns: [.., s, ..], the local tokens. The gradient of `x` is this rank's part of it, zero for other tokens.
    Cost: no communication.
    """
    context = _context(model)
    return x if context is None else select_tokens(x, context.layout_of(x.shape[dim]), context.group.rank, dim)


def gather_sequence(model: Any, x: T, dim: int = 1, full: int | None = None) -> T:
    """The tokens of all ranks of cp, in the order of the sequence.

    Args:
        model: a module on `cp`, or a `ParallelModel`. Without cp, `x` is returned.
        x: [.., s, ..], the local tokens.
        dim: dimension of the tokens.
        full: S, the number of tokens of all ranks. Default: that of the model's last forward.

    Returns: [.., S, ..]. Its gradient must be the same on every rank; each rank keeps the part for its tokens.
    Raises:
        ShapeError: `wrong-rows`.
        ModelError: `outside-context` if no length is known.
    Cost: one all-gather forward, none backward.
    """
    context = _context(model)
    if context is None:
        return x
    full = full or context.length
    if not full:
        what = "the length of the sequence is not known: no forward has run"
        raise ModelError(Problem("outside-context", what, fix="gather_sequence(..., full=S)"))
    layout, dim, rank = context.layout_of(full), dim % x.ndim, context.group.rank
    if x.shape[dim] != layout.num_tokens(rank):
        what = f"{x.shape[dim]} tokens in dim {dim}, and this rank has {layout.num_tokens(rank)} of {full}"
        raise ShapeError(Problem("wrong-rows", what, fix="pass `full`, or another dim"))
    return gather_tokens(x, context.group, layout, dim, "replicate")


def local_targets(context: Context, full: int, targets: Any) -> Any:
    """This rank's tokens of every tensor [batch, full, ..] among the targets of a step.

    Raises: ShapeError `wrong-rows` for targets of another shape, which cannot be split over ranks.
    """

    def split(leaf: Any) -> Any:
        if not isinstance(leaf, T):
            return leaf
        if leaf.ndim < 2 or leaf.shape[1] != full:
            what = f"targets {list(leaf.shape)} for sequences of {full} tokens over cp"
            raise ShapeError(Problem("wrong-rows", what, fix=f"a target for each token: [batch, {full}, ..]"))
        return select_tokens(leaf, context.layout_of(full), context.group.rank, 1)

    return private.tree_map(split, targets)


def _context(model: Any) -> Context | None:
    return context_of(inside_adapters(module_of(model)))
