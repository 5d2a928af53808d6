"""Calls of a model on `cp` with a key/value cache, and calls by `generate`.

A prompt into an empty cache is split over the ranks as in training, and each rank stores the keys and values of its
tokens. Tokens that follow, and prompts shorter than the ranks, are computed by all ranks, and attend to what each rank
stores. Either way the logits that `logits_to_keep` asks for, or `generate` needs, are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from parallelize.axes.context.cache_shards import CachedSequence, cache_refused
from parallelize.axes.context.forward_state import Context
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.axes.vocabulary.logits.forms import shard_of
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.errors import ModelError, Problem, ShapeError

T = torch.Tensor
KEEP = "logits_to_keep"


@dataclass(frozen=True)
class CachedCall:
    """One call with a cache, or by `generate`.

    Attributes:
        layout: the sequences of the call, with the tokens in the cache.
        splits: whether each rank computes a part of the tokens.
        cache: where keys and values are stored; None: nowhere.
        stock_cache: the cache of `transformers` itself. is_temporary: whether it is for this call alone.
        keep: how many of the last tokens need logits on every rank; 0: those of the local tokens.
    """

    layout: SequenceLayout
    splits: bool
    cache: CachedSequence | None
    stock_cache: Any = None
    is_temporary: bool = False
    keep: int = 0

    def local_indices(self, rank: int) -> list[int]:
        """Which local tokens are among the last `keep` ones; never empty, since no stock head runs on nothing."""
        return self.tokens_with_logits(rank)[0] or [self.layout.num_tokens(rank) - 1]

    def tokens_with_logits(self, rank: int) -> tuple[list[int], list[int]]:
        """(local indices, indices among the last `keep`) of a rank's tokens among the last `keep`."""
        positions = [position for run in self.layout.of_rank(rank) for position in range(*run)]
        first = self.layout.full - self.keep
        local = [index for index, position in enumerate(positions) if position >= first]
        return local, [positions[index] - first for index in local]


def cached_call(context: Context, root: Any, call: dict[str, Any], new: int) -> CachedCall | None:
    """How a call runs with a cache or in `generate`; None for any other call.

    Args:
        call: all arguments by name.
        new: tokens of the call.

    Raises: ModelError `cache-over-cp`, `hidden-states-over-cp`.
    """
    cache = call.get("past_key_values")
    if cache is None and not call.get("use_cache") and not context.generating:
        return None
    _refuse(root, context, call)
    short = any(not context.layout_of(new).of_rank(rank) for rank in range(context.group.size))
    is_temporary = cache is None and not call.get("use_cache")
    if cache is None and (call.get("use_cache") or short):
        cache = _new_cache(root)
    sequence = None if cache is None else context.shard_cache(cache)
    before = 0 if sequence is None else sequence.full
    splits = not before and not short
    keep = _keep(context, call, new) if splits else 0
    return CachedCall(context.layout_of(before + new), splits, sequence, cache, is_temporary, keep)


def _refuse(root: Any, context: Context, call: dict[str, Any]) -> None:
    if torch.is_grad_enabled():
        raise cache_refused("a key/value cache, or generation, in a forward that records a graph,")
    if call.get("labels") is not None or not all(kind == "causal" for kind in context.attention.values()):
        raise cache_refused("a cache with labels, or of attention that is not causal,")
    if context.generating and call.get("output_hidden_states"):
        what = f"{type(root).__name__} would return the hidden states of this rank's tokens of the prompt"
        fix = "output_hidden_states=False; or call the model, and gather_sequence what it returns"
        raise ModelError(Problem("hidden-states-over-cp", what, fix=fix))


def _keep(context: Context, call: dict[str, Any], new: int) -> int:
    keep = call.get(KEEP) or 0
    if isinstance(keep, torch.Tensor):
        what = "logits_to_keep as a tensor counts in the tokens of one rank"
        raise ModelError(Problem("one-row", what, fix="a number of last tokens"))
    return min(new, keep or int(context.generating))


def _new_cache(root: Any) -> Any:
    from transformers import DynamicCache

    config = getattr(root, "config", None)
    if config is None:
        raise cache_refused(f"use_cache of {type(root).__name__}, which has no config,")
    return DynamicCache(config=config.get_text_config(decoder=True))


def check_mask(mask: T | None, full: int) -> None:
    """Raises: ShapeError `bad-mask` for a padding mask that does not cover the cache and the new tokens."""
    if mask is not None and mask.shape[1] != full:
        what = f"attention_mask {list(mask.shape)} for {full} tokens, those in the cache included"
        raise ShapeError(Problem("bad-mask", what, fix=f"[batch, {full}]"))


def logits_on_every_rank(context: Context, call: CachedCall, out: Any, sliced: bool) -> None:
    """Replace the logits of a split call by those of the last `keep` tokens, in place.

    Args:
        sliced: whether the model has computed those of `CachedCall.local_indices` only.

    Raises: ModelError `one-row` for an output without a field `logits` [batch, tokens, vocabulary].
    Cost: one all-reduce of batch x keep x local vocabulary numbers over cp.
    """
    logits = out.get("logits") if isinstance(out, dict) else None
    if logits is None or logits.ndim != 3:
        what = f"a {type(out).__name__} has no logits of each token, of which the last are needed on every rank"
        raise ModelError(Problem("one-row", what, fix="a causal language model, called with return_dict=True"))
    local, vocabulary = shard_of(logits)
    indices, among_last = call.tokens_with_logits(context.group.rank)
    full = local.new_zeros((local.shape[0], call.keep, local.shape[2]))
    if indices:
        full[:, among_last] = local if sliced else local[:, indices]
    context.group.all_reduce(full)
    out["logits"] = mark(full, vocabulary) if vocabulary.group.size > 1 else full
