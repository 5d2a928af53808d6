"""How the attention of stock modules is intercepted: by the interface of `transformers`, or at
`scaled_dot_product_attention`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.context.cache_shards import CachedSequence, last_positions
from parallelize.axes.context.flex_calls import flex_over_context
from parallelize.axes.context.forward_state import Context, ContextAttention, ForwardSequences, attention_of
from parallelize.axes.tensor.attention_calls import AttentionCalls
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_flex import call_flex_attention
from parallelize.ops.all_to_all import HeadSplit, to_head_shards, to_sequence_shards
from parallelize.ops.attention.kernels import Mask, Scoring
from parallelize.ops.attention.ring_attention import ring_attention
from parallelize.ops.attention.ring_tiles import Masking, visible_keys
from parallelize.ops.attention.sharded_keys import attend_to_shards
from parallelize.ops.attention.weight_dropout import WeightDropout
from parallelize.state.forward_steps import ATTENTION, run_inner
from parallelize.state.randomness.dropout.call_sites import ModuleDropout
from parallelize.state.records import applied
from parallelize.state.step_results import as_instance

T = torch.Tensor
NAME = "parallelize_context"  # of this attention in the registry of `transformers`
_CHANGES_ATTENTION = ("position_bias", "head_mask", "cache", "cu_seq_lens_q", "block_table")


def register() -> None:
    """Register this attention with `transformers`, which creates no mask tensors for a name without a mask function."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, interface)


def interface(
    module: nn.Module,
    query: T,
    key: T,
    value: T,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: T | None = None,
    **others: Any,
) -> tuple[T, None]:
    """Attention as `transformers` calls it: [B, H, s, D] in, [B, s, H, E] out; s_aux [H] are attention sinks.

    Raises: ModelError `unplanned-attention`, `given-mask`, `attention-dropout`, `attention-argument`.
    """
    attention = _planned_attention(module)
    if attention_mask is not None:
        raise _mask_refused(attention.fqn)
    for name, argument in others.items():
        if name in _CHANGES_ATTENTION and argument is not None:
            what = f"{attention.fqn} passes {name} to its attention, which is not supported over cp"
            raise ModelError(Problem("attention-argument", what, fix="leave this model off cp"))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    masking = masking_of(attention, query, causal=causal, window=sliding_window, scale=scaling, softcap=softcap)
    drops = _dropout_of(module, attention, query, key, dropout)
    return attend(attention, query, key, value, masking, drops, s_aux).transpose(1, 2).contiguous(), None


def forward_over_context(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention module that calls `scaled_dot_product_attention` or `flex_attention`."""
    attention = self._applied.attention
    with AttentionCalls(partial(_sdpa, self, attention), partial(flex_over_context, self, attention)):
        return run_inner(self, ATTENTION, args, kwargs)


def _sdpa(
    module: nn.Module,
    attention: ContextAttention,
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """With the parameters of `scaled_dot_product_attention`."""
    if attn_mask is not None:
        raise _mask_refused(attention.fqn)
    if query.ndim != 4:
        what = f"{attention.fqn} attends with queries {list(query.shape)}"
        raise ModelError(Problem("wrong-rows", what, fix="attention over cp takes [batch, heads, tokens, width]"))
    masking = masking_of(attention, query, causal=is_causal, window=None, scale=scale, softcap=None)
    return attend(attention, query, key, value, masking, _dropout_of(module, attention, query, key, dropout_p))


def unplanned_refused(context: Context) -> AttentionCalls:
    """A mode in which attention is refused in a module that the plan does not name."""
    of_sdpa, of_flex = F.scaled_dot_product_attention, call_flex_attention
    return AttentionCalls(partial(_refuse_unplanned, context, of_sdpa), partial(_refuse_unplanned, context, of_flex))


def _refuse_unplanned(context: Context, stock: Any, *args: Any, **kwargs: Any) -> T:
    """Attention in a module that the plan does not name, which would see local tokens only. Raises: ModelError."""
    if context.runs_gathered:
        return stock(*args, **kwargs)
    fix = "name its module under `attention:` in the plan"
    raise ModelError(Problem("unplanned-attention", "attention runs in a module that no rule names", fix=fix))


def _planned_attention(module: nn.Module) -> ContextAttention:
    attention = attention_of(module)
    if attention is None:
        what = f"a {type(module).__name__} calls attention, and no rule of the plan names it"
        raise ModelError(Problem("unplanned-attention", what, fix="name it under `attention:`"))
    return attention


def _mask_refused(fqn: str) -> ModelError:
    what = f"{fqn} is called with a mask, which covers the tokens of this rank only"
    fix = "a causal flag, a window, packed position ids, or a padding mask [batch, tokens] passed to the model"
    return ModelError(Problem("given-mask", what, fix=fix))


def _dropout_of(module: nn.Module, attention: ContextAttention, query: T, key: T, p: float) -> WeightDropout | None:
    """The dropout of the attention weights of a call, whose number among the module's calls is that of the unsharded
    model.

    Raises: ModelError `attention-dropout` where no global mask is installed for this module.
    """
    if not p or query.is_meta:  # a trace has no values to drop
        return None
    dropout = as_instance(applied(module).dropout, ModuleDropout)
    if dropout is None or not dropout.sites.scopes:
        what = f"{attention.fqn} drops attention weights (p = {p}), and nothing says which"
        fix = "install_dropout(model, seed) after the model is put on cp; or a rate of 0"
        raise ModelError(Problem("attention-dropout", what, fix=fix))
    return dropout.sites.of_weights(dropout.sites.scopes[-1].call_site(), query, key, p)


# -- attention -------------------------------------------------------------------------------------------------------
# Attention over `cp`: exchange tokens for heads in a ulysses group, send key/value blocks around the ring, exchange
# back.


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

    Shapes (s: local tokens): q [B, H, s, D], k [B, K, s, D], v [B, K, s, E], sinks [H] (see `ring_attention`); returns
    [B, H, s, E].

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
    out = _attend_over_ring(context, sequences, q, k, v, masking, dropout, sinks)
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


def _attend_over_ring(
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


# -- cached attention ------------------------------------------------------------------------------------------------
# Attention of new tokens, which every rank of `cp` computes, to a cache of which each rank stores a part.


def attend_to_cache(
    module: ContextAttention,
    q: T,
    k: T,
    v: T,
    masking: Masking,
    cache: CachedSequence,
    documents: T | None,
    sinks: T | None = None,
) -> T:
    """Attention of the last tokens of a sequence to all of it.

    Shapes: q [B, H, new, D], the same on every rank; k [B, K, n, D] and v [B, K, n, E], what this rank stores of a
        layer; returns
    [B, H, new, E], the same on every rank.

    Raises: ModelError `wrong-rows`.
    """
    stop = cache.full
    start = stop - cache.new
    stored = cache.tokens.of_rank(cache.rank, 0, stop)
    first = max(0, start + 1 - masking.window) if masking.window else 0
    needed = cache.tokens.count(cache.rank, first, stop)
    if q.shape[2] != cache.new or not needed <= k.shape[2] <= sum(map(len, stored)):
        what = (
            f"{module.fqn} attends from {q.shape[2]} of {cache.new} new tokens to {k.shape[2]} local keys of {needed} "
            "that it needs"
        )
        fix = "self-attention with one cache, whose sliding layers have the model's window; or leave this model off cp"
        raise ModelError(Problem("wrong-rows", what, fix=fix))
    positions = last_positions(stored, k.shape[2])  # a sliding layer stores the last ones
    mask = None
    if documents is not None or not _all_visible(positions, start, stop, masking):
        mask = _mask(positions, start, stop, masking, documents, q.device)
    scoring = Scoring(mask, False, masking.scale, masking.softcap)
    return attend_to_shards(q, k, v, module.context.group, scoring, sinks)


def _all_visible(keys: tuple[range, ...], start: int, stop: int, masking: Masking) -> bool:
    """Whether queries `start` to `stop` - 1 attend to all of these keys of one document."""
    if not keys:
        return True
    after_none = keys[-1][-1] <= start
    return after_none and (not masking.window or keys[0][0] > stop - 1 - masking.window)


def _mask(
    keys: tuple[range, ...], start: int, stop: int, masking: Masking, documents: T | None, device: torch.device
) -> Mask:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    key_positions = torch.cat([empty, *(torch.arange(r.start, r.stop, r.step, device=device) for r in keys)])

    def visible(first: int, last: int) -> T:
        return visible_keys(torch.arange(start + first, start + last, device=device), key_positions, masking, documents)

    return visible
