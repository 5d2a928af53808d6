"""Attention over `cp`: exchange tokens for heads in a ulysses group, send key/value blocks around the ring, exchange back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.axes.context.cached_attention import attend_to_cache
from parallelize.axes.context.forward_state import Context, ContextAttention, ForwardSequences
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.all_to_all import HeadSplit, to_head_shards, to_sequence_shards
from parallelize.ops.attention.ring_attention import Masking, ring_attention
from parallelize.ops.attention.weight_dropout import WeightDropout

T = torch.Tensor


def attend(
    module: ContextAttention,
    q: T,
    k: T,
    v: T,
    masking: Masking,
    dropout: WeightDropout | None = None,
    sinks: T | None = None,
) -> T:
    """Attention of the local queries to the full sequence.

    Shapes (s: local tokens): q [B, H, s, D], k [B, K, s, D], v [B, K, s, E], sinks [H] (see `ring_attention`); returns [B, H, s, E].

    Raises: ModelError `wrong-rows`, `attention-kind`.
    """
    context, device = module.context, q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    sequences = context.current()
    _check_kind(module, masking)
    if sequences.cached is not None:
        context.attended.add(module.fqn)
        return attend_to_cache(module, q, k, v, masking, sequences.cached, sequences.documents, sinks)
    _check_tokens(module, sequences, q, k)
    context.attended.add(module.fqn)
    if masking.window >= sequences.layout.full:  # of this forward: in a recompute it may not be the last one
        masking = replace(masking, window=0)
    exchanges = context.ulysses.size > 1
    heads = HeadSplit.of(q.shape[1], k.shape[1], context.ulysses.size)
    if exchanges:
        sizes = sequences.layout.ulysses_sizes(context.ring_rank)
        q, k, v = to_head_shards(q, k, v, context.ulysses, heads, sizes)
        start, stop = heads.queries[context.ulysses.rank]
        dropout = dropout and dropout.from_head(start)
        sinks = None if sinks is None else sinks[start:stop]
    out = _over_ring(context, sequences, q, k, v, masking, dropout, sinks)
    if exchanges:
        out = to_sequence_shards(out, context.ulysses, heads, sizes)
    context.attach(sequences, out)
    return out


def _check_tokens(module: ContextAttention, sequences: ForwardSequences, q: T, k: T) -> None:
    tokens = sequences.layout.num_tokens(module.context.group.rank)
    if q.shape[2] != tokens or k.shape[2] != tokens:
        what = f"{module.fqn} attends from {q.shape[2]} queries to {k.shape[2]} keys, and this rank has {tokens} tokens"
        fix = "self-attention, with caches of transformers only; cross-attention is not supported on cp"
        raise ModelError(Problem("wrong-rows", what, fix=fix))


def _check_kind(module: ContextAttention, masking: Masking) -> None:
    kind = "causal" if masking.causal else "bidirectional"
    if kind != module.kind:
        what = f"{module.fqn} is {kind}, and the plan says that it is {module.kind}"
        raise ModelError(Problem("attention-kind", what, fix=f"write `{kind}` under `attention:`"))


def _over_ring(
    context: Context,
    sequences: ForwardSequences,
    q: T,
    k: T,
    v: T,
    masking: Masking,
    dropout: WeightDropout | None,
    sinks: T | None,
) -> T:
    if not q.shape[1]:  # fewer heads than ranks: nothing to compute, but backward must reach q, k and v
        empty = q.new_zeros((*q.shape[:3], v.shape[3]))
        return empty + (q.sum() + k.sum() + v.sum() + (0 if sinks is None else sinks.sum()))
    simple = sequences.documents is None and not masking.window and not masking.softcap and dropout is sinks is None
    if context.ring.size == 1 and simple:
        options: dict[str, Any] = {"is_causal": masking.causal, "scale": masking.scale}
        if q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        with private.plain_calls():
            return F.scaled_dot_product_attention(q, k, v, **options)
    runs = tuple(sequences.layout.of_ring_rank(ring_rank) for ring_rank in range(context.ring.size))
    return ring_attention(q, k, v, context.ring, runs, masking, sequences.documents, dropout, sinks)


def masking_of(
    module: ContextAttention, q: T, *, causal: bool, window: int | None, scale: float | None, softcap: float | None
) -> Masking:
    """The mask that a call of attention asks for.

    Raises: ModelError `window-without-causal`.
    """
    if window and not causal:
        what = f"{module.fqn} has a window of {window} tokens and no causal mask"
        fix = "leave this model off cp: only causal windows are supported"
        raise ModelError(Problem("window-without-causal", what, fix=fix))
    return Masking(causal, window or 0, q.shape[-1] ** -0.5 if scale is None else float(scale), softcap or 0.0)
