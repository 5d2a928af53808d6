"""`flex_attention` over `cp`: the queries of a rank's tokens attend to the keys of the whole sequence.

    exchange tokens for heads in a ulysses group -> all-gather keys and values over the ring, in the order of the
    sequence -> attention, whose functions get the numbers of heads and tokens in the unsharded model -> exchange back
    backward: reduce-scatter of the gradients of keys and values

A ring of blocks would need a block mask for each block, and gradients through the log-sums by which blocks are
combined. Keys and values of all tokens are stored by every rank for backward.

A block mask of all tokens is passed as it is: its function counts tokens as the unsharded model does. One that the
forward makes, of local tokens, has a function that reads local tensors: where those are inputs of the model, the
function reads the full inputs instead.

Source: Grattafiori et al., Llama 3, arXiv:2407.21783, sec. 3.3.2 (all-gather of keys and values).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.context.cache_shards import cache_refused
from parallelize.axes.context.forward_state import Context, ContextAttention, ForwardSequences
from parallelize.axes.context.gathered_modules import gather_tokens, on_all_tokens
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private.torch_flex import call_flex_attention, flex_module
from parallelize.ops.all_to_all import HeadSplit, to_head_shards, to_sequence_shards
from parallelize.ops.attention.flex_attention import returned
from parallelize.ops.attention.flex_masks import (
    Numbers,
    closed_over,
    local_mask,
    reading,
    renumbered_scores,
    visible_by,
    warn_of_local_numbers,
    with_all_keys,
)
from parallelize.ops.attention.flex_scores import Attended

T = torch.Tensor


def flex_over_context(
    module: nn.Module,
    attention: ContextAttention,
    query: T,
    key: T,
    value: T,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """With the parameters of `flex_attention`, after the module that calls it.

    Shapes (s: local tokens): query [B, H, s, D], key [B, K, s, D], value [B, K, s, E]; the output is [B, H, s, E].

    Raises: ModelError `wrong-rows`, `cache-over-cp`, `local-mask`.
    Cost: an all-gather of a rank's keys and values, and a reduce-scatter of their gradients; under Ulysses exchanges as
        of `attend`, and the all-gather over the ring.
    """
    context = attention.context
    sequences = context.current()
    _check_tokens(attention, sequences, query, key)
    full_tensor = _FullTensors(module, attention, sequences)
    functions = [score_mod] if block_mask is None else [score_mod, block_mask.mask_mod]
    warn_of_local_numbers(attention.fqn, functions, "tokens", query.shape[2], sequences.layout.full)
    score_mod = full_tensor.read_by(score_mod)
    block_mask = _of_all_tokens(attention, sequences, block_mask, full_tensor)
    exchange = _Exchange(context, sequences, query, key)
    q, k, v = exchange.to_heads(query, key, value)
    k, v = _all_keys(context, sequences, k, v)
    with on_all_tokens(sequences):
        attended = _attended(exchange, sequences, (q, k, v), score_mod, block_mask, (scale, kernel_options, return_aux))
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    attended = exchange.to_tokens(attended, wants_lse, return_aux is not None and return_aux.max_scores)
    context.attended.add(attention.fqn)
    context.attach(sequences, attended.out)
    return returned(attended, return_lse, return_aux)


def _check_tokens(attention: ContextAttention, sequences: ForwardSequences, query: T, key: T) -> None:
    if sequences.cached is not None:
        raise cache_refused(f"{attention.fqn} calls flex_attention, and")
    tokens = sequences.layout.num_tokens(attention.context.group.rank)
    if query.ndim != 4 or query.shape[2] != tokens or key.shape[2] != tokens:
        what = (
            f"{attention.fqn} calls flex_attention of queries {list(query.shape)} and keys {list(key.shape)}, and this "
            f"rank has {tokens} tokens"
        )
        raise ModelError(Problem("wrong-rows", what, fix="self-attention of [batch, heads, tokens, width]"))


# -- functions of all tokens -------------------------------------------------------------------------------------------


class _FullTensors:
    """The full tensor of each local one that a function of scores or of the mask reads.

    Raises: ModelError `local-mask` for a tensor of local tokens that is no input of the model.
    """

    def __init__(self, module: nn.Module, attention: ContextAttention, sequences: ForwardSequences):
        self.fqn, self.sequences = attention.fqn, sequences
        self.local = sequences.layout.num_tokens(attention.context.group.rank)
        self.known = {id(x) for x in module.buffers()}

    def __call__(self, x: T) -> T:
        for local, full in self.sequences.cut:
            if x.data_ptr() == local.data_ptr() and x.shape == local.shape and x.stride() == local.stride():
                return full
        self._check(x)
        return x

    def read_by(self, function: Any) -> Any:
        """A function that reads full tensors."""
        for value, names in closed_over(function):
            if isinstance(value, nn.Module):  # whose attributes are read when it runs
                for x in (getattr(value, name, None) for name in names):
                    if isinstance(x, T):
                        self._check(x)
        return reading(function, self)

    def _check(self, x: T) -> None:
        full_tokens = self.sequences.layout.full
        is_of_tokens = self.local in x.shape and full_tokens not in x.shape
        if is_of_tokens and id(x) not in self.known and not (x.is_leaf and x.requires_grad):
            what = f"{self.fqn}: a function of its flex_attention reads a tensor {list(x.shape)} of the local tokens"
            fix = f"read an input of the model, or pass a block mask of all {full_tokens} tokens to the model"
            raise ModelError(Problem("local-mask", what, fix=fix))


def _of_all_tokens(
    attention: ContextAttention, sequences: ForwardSequences, block_mask: Any, full_tensor: _FullTensors
) -> Any:
    """The block mask of all tokens; None for none."""
    if block_mask is None:
        return None
    full, lengths = sequences.layout.full, tuple(block_mask.shape[-2:])
    if lengths == (full, full):
        return block_mask
    if lengths == (full_tensor.local, full_tensor.local):
        return with_all_keys(block_mask, full_tensor.read_by(visible_by(block_mask)), full)
    what = f"{attention.fqn} has a block mask of {lengths} tokens, and sequences have {full}"
    raise ModelError(Problem("wrong-rows", what, fix=f"create_block_mask(..., Q_LEN={full}, KV_LEN={full})"))


# -- what is sent ------------------------------------------------------------------------------------------------------


class _Exchange:
    """Tokens for heads in a ulysses group, and back."""

    def __init__(self, context: Context, sequences: ForwardSequences, query: T, key: T):
        self.context, self.group = context, context.ulysses
        self.heads = HeadSplit.of(query.shape[1], key.shape[1], self.group.size)
        self.sizes = sequences.layout.ulysses_sizes(context.ring_rank)
        self.first = self.heads.queries[self.group.rank][0]

    def to_heads(self, q: T, k: T, v: T) -> tuple[T, T, T]:
        return (q, k, v) if self.group.size == 1 else to_head_shards(q, k, v, self.group, self.heads, self.sizes)

    def to_tokens(self, attended: Attended, wants_lse: bool, wants_max: bool) -> Attended:
        if self.group.size == 1:
            return attended
        lse = self._back(attended.lse.unsqueeze(-1)).squeeze(-1) if wants_lse else attended.lse
        highest = self._back(attended.max_scores.unsqueeze(-1)).squeeze(-1) if wants_max else attended.max_scores
        return Attended(self._back(attended.out), lse, highest)

    def _back(self, x: T) -> T:
        return to_sequence_shards(x, self.group, self.heads, self.sizes)


def _all_keys(context: Context, sequences: ForwardSequences, k: T, v: T) -> tuple[T, T]:
    """Keys and values of all ranks of the ring, in the order of the sequence."""
    if context.ring.size == 1:
        return k, v
    layout = replace(sequences.layout, ulysses=1)  # of ring ranks
    both = gather_tokens(torch.cat([k, v], -1), context.ring, layout, 2, "partial")
    k, v = both.split([k.shape[3], v.shape[3]], -1)
    return k, v


def _attended(
    exchange: _Exchange,
    sequences: ForwardSequences,
    tensors: tuple[T, T, T],
    score_mod: Any,
    block_mask: Any,
    options: tuple[float | None, Any, Any],
) -> Attended:
    """Attention of the queries of a ring rank and of the heads of a ulysses rank, with all that is computed."""
    (q, k, v), (scale, kernel_options, return_aux) = tensors, options
    if not q.shape[1]:  # fewer heads than ranks: nothing to compute, but backward must reach q, k and v
        empty = q.new_zeros((*q.shape[:3], v.shape[3])) + (q.sum() + k.sum() + v.sum())
        return Attended(empty, empty.sum(-1), empty.sum(-1))
    context = exchange.context
    runs = sequences.layout.of_ring_rank(context.ring_rank) if context.ring.size > 1 else ()
    numbers = Numbers(exchange.first, runs)
    mask = local_mask(block_mask, numbers, q.shape[2], q.shape[1])
    aux = flex_module().AuxRequest(lse=True, max_scores=return_aux is not None and return_aux.max_scores)
    scores, repeats = renumbered_scores(score_mod, numbers), q.shape[1] != k.shape[1]
    out, found = call_flex_attention(q, k, v, scores, mask, scale, repeats, False, kernel_options, aux)
    return Attended(out, found.lse, found.max_scores)
