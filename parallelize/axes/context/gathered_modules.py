"""Modules that mix tokens otherwise than by attention over the ranks of `cp`: recurrences, convolutions, attention with
masks of its own.

    all-gather the tokens of every argument -> the module's own forward on the full sequence -> this rank's tokens of
    its output backward: reduce-scatter of the arguments' gradients; gradients of parameters are this rank's part of the
    sum over cp, as elsewhere

It is exact for any module, and costs what the module costs without `cp`: each rank computes it for all tokens, and
stores its activations of the full sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.axes.context.forward_state import Context, ContextAttention, ForwardSequences
from parallelize.axes.context.inputs import select_tokens
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.axes.tensor.planned_forward import installed
from parallelize.axes.tensor.region import Region
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.models.wrapped_models import forward_signature
from parallelize.state.forward_steps import GATHERED as GATHERED_STEP
from parallelize.state.forward_steps import add_step, run_inner

T = torch.Tensor
GATHERED = "gathered"
_MASK = "attention_mask"


def install_gathered(module: nn.Module, attention: ContextAttention) -> None:
    """Let a module run on all tokens, between the conversions of its plan over `tp`, if it has any."""
    add_step(module, GATHERED_STEP, _forward_on_all_tokens)


def check_masks(attention: dict[str, str], modules: dict[str, nn.Module]) -> None:
    """Refuse attention that is gathered and needs a mask, in a model of which other attention runs over the ranks.

    Raises: ModelError `mask-over-cp`.
    """
    if set(attention.values()) == {GATHERED}:
        return
    for fqn, kind in attention.items():
        needs = (
            [m for m in modules[fqn].modules() if takes_registered_attention(m)]
            if kind == GATHERED and fqn in modules
            else []
        )
        if needs:
            what = (
                f"{fqn} is gathered, and a {type(needs[0]).__name__} in it takes a mask of the full sequence, which is "
                "not made, because other attention runs over the ranks"
            )
            raise ModelError(Problem("mask-over-cp", what, fix="name all attention `gathered`, or none"))


def check_overlap(attention: dict[str, str], modules: dict[str, nn.Module]) -> None:
    """Refuse gathered modules whose collectives over `tp` overlap with matmuls, which have the tokens of one rank.

    Raises: ModelError `gathered-overlap`.
    """
    for fqn, kind in attention.items():
        inner = modules[fqn].modules() if kind == GATHERED and fqn in modules else ()
        if any(planned is not None and planned.overlap is not None for planned in map(installed, inner)):
            what = f"{fqn} is gathered over cp, and its collectives over tp overlap with matmuls of local tokens"
            fix = "apply tp and cp in one call, which leaves this overlap out; or overlap=off"
            raise ModelError(Problem("gathered-overlap", what, fix=fix))


def takes_registered_attention(module: nn.Module) -> bool:
    """Whether a module takes its attention, and so its masks, from the registry of `transformers`."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _forward_on_all_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
    attention: ContextAttention = self._applied.attention
    context = attention.context
    sequences = context.current()
    if sequences.cached is not None:
        what = f"{attention.fqn} is gathered over cp, and has no cache there"
        raise ModelError(Problem("cache-over-cp", what, fix="use_cache=False"))
    layout, rank = sequences.layout, context.group.rank
    gather = partial(_gathered, context=context, layout=layout)
    args, kwargs = _with_full_mask(self, sequences, layout.num_tokens(rank), args, kwargs)
    args = tuple(map(gather, args))
    kwargs = {name: value if name == _MASK else gather(value) for name, value in kwargs.items()}
    with on_all_tokens(sequences, attention.region, partial(_selected, layout=layout, rank=rank)):
        out = run_inner(self, GATHERED_STEP, args, kwargs)
    context.attended.add(attention.fqn)
    out = _selected(out, layout, rank)
    context.attach(sequences, out[0] if isinstance(out, (tuple, list)) else out)
    return out


@contextmanager
def on_all_tokens(
    sequences: ForwardSequences, region: Region | None = None, select: Callable[[T], T] | None = None
) -> Iterator[None]:
    """A context in which the module inside has all tokens; only this rank's are reduced over `tp` into shards of the
    sequence."""
    sequences.is_gathered = True
    try:
        with nullcontext() if region is None or select is None else region.selecting(select):
            yield
    finally:
        sequences.is_gathered = False


def _gathered(value: Any, context: Context, layout: SequenceLayout) -> Any:
    """All tokens of every local tensor [B, s, ..] in nested tuples and lists.

    Dicts stay the objects that they are, because modules write to those: what a gathered module stores has all tokens.
    """
    if isinstance(value, T):
        local = layout.num_tokens(context.group.rank)
        if value.ndim < 2 or value.shape[1] != local or _is_mask(value, layout):
            return value
        if value.is_complex():  # of rotary tables; not every backend sends complex numbers
            return torch.view_as_complex(_gathered(torch.view_as_real(value), context, layout))
        return gather_tokens(value, context.group, layout, 1, "partial")
    if type(value) in (tuple, list):
        return type(value)(_gathered(item, context, layout) for item in value)
    return value


def _is_mask(x: T, layout: SequenceLayout) -> bool:
    """Whether a tensor [B, heads or 1, S, S] has no dim of local tokens."""
    return x.ndim == 4 and x.shape[2] == x.shape[3] == layout.full


def _selected(out: Any, layout: SequenceLayout, rank: int) -> Any:
    """This rank's tokens of every tensor [B, S, ..] of an output."""
    if isinstance(out, T):
        is_full = out.ndim >= 2 and out.shape[1] == layout.full and not _is_mask(out, layout)
        return select_tokens(out, layout, rank, 1) if is_full else out
    if type(out) in (tuple, list):
        return type(out)(_selected(item, layout, rank) for item in out)
    return out


def _with_full_mask(
    module: nn.Module, sequences: ForwardSequences, local: int, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """The arguments with the padding mask of all tokens, where a model passes one [B, s].

    Models cut the mask [B, S] to as many tokens as they see, and drop it for a single one.
    """
    if sequences.padding is None or _MASK not in forward_signature(module).parameters:
        return args, kwargs
    bound = forward_signature(module).bind(None, *args, **kwargs)
    mask = bound.arguments.get(_MASK)
    if (mask is None and local == 1) or (isinstance(mask, T) and mask.ndim == 2):
        bound.arguments[_MASK] = sequences.padding
        return bound.args[1:], bound.kwargs
    return args, kwargs


# -- gathered tokens -------------------------------------------------------------------------------------------------
# All tokens of sequences from the local tokens of each rank of `cp`, in the order of the sequence.


def gather_tokens(x: T, group: Group, layout: SequenceLayout, dim: int, gradient: str) -> T:
    """The tokens of all ranks. x: [.., s, ..], the local tokens in `dim`, which is not negative; returns [.., S, ..].

    Args:
        gradient: of the result, as in `ops.collectives.gather`: "partial" on each rank, or "replicate".

    Cost: one all-gather of the longest rank's tokens; backward a reduce-scatter of as many, or nothing.
    """
    padded = max(layout.num_tokens(rank) for rank in range(layout.size))
    gathered = ops.gather(ops.pad_to(x, dim, padded), group, dim, padded * layout.size, gradient)
    runs = layout.gathered_runs(padded)
    if runs == ((0, padded * layout.size),):
        return gathered
    return torch.cat([gathered.narrow(dim, start, stop - start) for start, stop in runs], dim)
