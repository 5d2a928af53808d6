"""The style `ulysses`: attention of a stock module inside the sequence-parallel region, by all-to-alls over `tp`.

The module's projections are replicated and compute this rank's tokens. All-to-alls exchange the sequence shard for a head
shard around `scaled_dot_product_attention`, which computes all tokens of this rank's heads; a mask or a causal flag of the
full sequence needs no change. What the decoder computes for the full sequence outside the region, such as rotary tables, is
named in the rule, `ulysses(position_embeddings)`, and split to this rank's tokens.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.tensor.attention_calls import AttentionCalls
from parallelize.axes.tensor.planned_forward import argument_of, convert_argument
from parallelize.axes.tensor.region import Region
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops import collectives as ops
from parallelize.ops.all_to_all import HeadSplit, to_head_shards, to_sequence_shards

T = torch.Tensor


def ulysses_attention(module: nn.Module, region: Region, split: tuple[str, ...]) -> Callable:
    """A forward that exchanges tokens for heads where the module calls `scaled_dot_product_attention`.

    Args:
        split: arguments of the forward with values for the full sequence, which are split to this rank's tokens.

    Raises: ModelError `no-such-argument`; from the forward, `no-attention-call`, `wrong-rows`.
    """
    hidden, split_arguments = argument_of(module, ""), [argument_of(module, name) for name in split]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        planned = self._applied.planned
        x = args[0] if args else kwargs[hidden[1]]
        if not region.gathers(x, region.dim):  # one token is decoded: nothing is sharded
            return planned.run_stock(self, args, kwargs)
        full = region.gathered_size(x, region.dim)

        def local(value: T) -> T:
            is_full = isinstance(value, T) and value.ndim > region.dim and value.shape[region.dim] == full
            return ops.split(value, region.group, region.dim, padded=True) if is_full else value

        for argument in split_arguments:
            args, kwargs = convert_argument(lambda value: private.tree_map(local, value), argument, args, kwargs)
        attention = _ExchangedAttention(self, region, full)
        with AttentionCalls(attention.attend):
            out = planned.run_stock(self, args, kwargs)
        attention.check()
        return out

    return forward


def check_ulysses(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `attention-by-hand` where a `transformers` model is configured for attention without PyTorch's op."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if implementation != "sdpa":
        what = f"{fqn} computes attention by {implementation!r}, which never calls F.scaled_dot_product_attention"
        raise ModelError(Problem("attention-by-hand", what, fix='build the model with attn_implementation="sdpa"'))


class _ExchangedAttention:
    """`scaled_dot_product_attention` of one forward, with all tokens of this rank's heads."""

    def __init__(self, module: nn.Module, region: Region, full: int):
        self.module, self.group, self.full = type(module).__name__, region.group, full
        self.called = False

    def attend(self, *args: Any, **kwargs: Any) -> T:
        self.called = True
        with private.plain_calls():
            return self._attend(*args, **kwargs)

    def _attend(self, query: T, key: T, value: T, attn_mask: T | None = None, *rest: Any, **others: Any) -> T:
        size, shard_size = self.group.size, query.shape[2]
        if query.ndim != 4 or shard_size != -(-self.full // size) or key.shape[2] != shard_size:
            what = f"a {self.module} attends with {list(query.shape)} to {list(key.shape)}; {self.full} tokens are sharded over {size} ranks"
            raise ModelError(Problem("wrong-rows", what, fix="self-attention of [batch, heads, tokens, width]"))
        intervals = [even_interval(self.full, size, rank) for rank in range(size)]
        tokens = [stop - start for start, stop in intervals]
        heads = HeadSplit.of(query.shape[1], key.shape[1], size)
        query, key, value = (x.narrow(2, 0, tokens[self.group.rank]) for x in (query, key, value))
        q, k, v = to_head_shards(query, key, value, self.group, heads, tokens)
        if not q.shape[1]:  # fewer heads than ranks: this rank takes part in the collectives of backward
            out = q.new_zeros((*q.shape[:3], v.shape[3])) + (q.sum() + k.sum() + v.sum())
        else:
            mask = _local_mask(attn_mask, query.shape[1], *heads.queries[self.group.rank])
            options = {name: value for name, value in others.items() if name != "enable_gqa"}
            if q.shape[1] != k.shape[1]:
                options["enable_gqa"] = True
            out = F.scaled_dot_product_attention(q, k, v, mask, *rest, **options)
        return ops.pad_to(to_sequence_shards(out, self.group, heads, tokens), 2, shard_size)

    def check(self) -> None:
        if not self.called:
            what = f"a {self.module} under `ulysses` never calls F.scaled_dot_product_attention"
            fix = "the sdpa attention of transformers, or a rule on the module that does call it"
            raise ModelError(Problem("no-attention-call", what, fix=fix))


def _local_mask(mask: T | None, num_heads: int, start: int, stop: int) -> T | None:
    """The mask of this rank's heads, where the mask [.., heads, tokens, tokens] differs between heads."""
    if mask is None or mask.ndim < 3 or mask.shape[-3] != num_heads or num_heads == 1:
        return mask
    return mask.narrow(-3, start, stop - start)
