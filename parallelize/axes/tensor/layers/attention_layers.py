"""Attention that runs on local heads: `nn.MultiheadAttention`, and stock attention that exchanges tokens for heads
(Ulysses).

The stock forward of `nn.MultiheadAttention` passes weights, those of `out_proj` among them, to one function that takes
all heads. A sharded module runs the same arithmetic on this rank's heads, and calls `out_proj`, which its own rule
shards by rows. A replicated one runs its stock forward on local tensors.

Source: Vaswani et al., arXiv:1706.03762; the masks and options are those of `torch.nn.MultiheadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.tensor.attention_calls import AttentionCalls
from parallelize.axes.tensor.planned_forward import (
    ModuleRuntime,
    argument_of,
    convert_argument,
    installed,
    on_local_parameters,
)
from parallelize.axes.tensor.region import Region
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.layout import even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_flex import call_flex_attention
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops.all_to_all import HeadSplit, to_head_shards, to_sequence_shards
from parallelize.ops.attention.flex_masks import Numbers, local_mask, renumbered_scores

T = torch.Tensor


def check_multihead(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `wrong-module-for-style` for a module that is no `nn.MultiheadAttention`."""
    if not isinstance(module, nn.MultiheadAttention):
        what = f"`multihead` needs an nn.MultiheadAttention, and {fqn} is a {type(module).__name__}"
        raise ModelError(Problem("wrong-module-for-style", what, fix="`colwise` and `rowwise` for its linears"))
    if not isinstance(module.out_proj, nn.Linear):
        what = f"the out_proj of {fqn} is a {type(module.out_proj).__name__}"
        raise ModelError(Problem("wrong-module-for-style", what, fix="`multihead` before out_proj is replaced"))


def replicated_multihead(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward, which reads the parameters of `out_proj` too, on local tensors."""
    planned, out = self._applied.planned, self.out_proj
    inner = installed(out)
    slots = inner.slots if inner is not None else ()
    try:
        for slot in slots:
            out.__dict__[slot.key] = slot.local(out._parameters)
        return on_local_parameters(self, planned, args, kwargs)
    finally:
        for slot in slots:
            out.__dict__.pop(slot.key, None)


def sharded_multihead(group: Group) -> Callable[..., Any]:
    """A forward on this rank's heads, with the arguments and results of the stock one."""

    def forward(
        self: Any,
        query: T,
        key: T,
        value: T,
        key_padding_mask: T | None = None,
        need_weights: bool = True,
        attn_mask: T | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[T, T | None]:
        if is_causal and attn_mask is None:
            raise ShapeError(Problem("no-mask", "is_causal needs attn_mask, as in nn.MultiheadAttention"))
        is_single, first = query.ndim == 2, self.batch_first
        inputs = _each(lambda x: x.unsqueeze(0) if is_single else x if first else x.transpose(0, 1), query, key, value)
        planned = self._applied.planned
        enter = planned.enter
        q, k, v = _project(self, planned, inputs if enter is None else _each(enter, *inputs))
        padding = key_padding_mask.unsqueeze(0) if is_single and key_padding_mask is not None else key_padding_mask
        causal = is_causal and padding is None and not need_weights and self.bias_k is None and not self.add_zero_attn
        mask = None if causal else _mask(q, k.shape[2], attn_mask, padding, self.num_heads, group)
        drop = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), drop)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, drop, causal)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = _gathered(weights, group, self.num_heads, average_attn_weights)
            weights = weights.squeeze(0) if is_single else weights
        return out.squeeze(0) if is_single else out if first else out.transpose(0, 1), weights

    return forward


def _each(function: Callable[[T], T], *tensors: T) -> tuple[T, ...]:
    """The function of each tensor, called once for the same one, so that all of its readers share a conversion."""
    results: dict[int, T] = {}
    for x in tensors:
        if id(x) not in results:
            results[id(x)] = function(x)
    return tuple(results[id(x)] for x in tensors)


def _project(module: Any, planned: ModuleRuntime, inputs: tuple[T, ...]) -> tuple[T, ...]:
    """[batch, length, features] of query, key and value -> [batch, this rank's heads, length, width of a head] of
    each."""
    own = {slot.key: slot.local(module._parameters) for slot in planned.slots}
    bias = own.get("in_proj_bias")
    if "in_proj_weight" in own and inputs[0] is inputs[1] is inputs[2]:
        projected = F.linear(inputs[0], own["in_proj_weight"], bias).chunk(3, -1)
    else:
        packed = own.get("in_proj_weight")
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = [own[name] for name in names] if packed is None else packed.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        projected = tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    query, *others = projected
    for index, name in enumerate(("bias_k", "bias_v")):
        if name in own:
            others[index] = torch.cat([others[index], own[name].expand(len(query), -1, -1)], 1)
    if module.add_zero_attn:
        others = [F.pad(x, (0, 0, 0, 1)) for x in others]
    return tuple(x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (query, *others))


def _mask(q: T, keys: int, attention: T | None, padding: T | None, num_heads: int, group: Group) -> T | None:
    """What is added to scores [batch, this rank's heads, queries, keys]; None for no mask.

    Args:
        attention: [queries, keys], or [batch * all heads, queries, keys]. padding: [batch, keys]. Of booleans, True
            hides. Keys beyond theirs, of `bias_k` and of zeros, are seen.
    """
    total = None
    if attention is not None:
        local = _additive(attention, q.dtype)
        if attention.ndim == 3:
            local = local.unflatten(0, (-1, num_heads)).narrow(1, group.rank * q.shape[1], q.shape[1])
        total = F.pad(local, (0, keys - local.shape[-1]))
    if padding is not None:
        local = _additive(padding, q.dtype)[:, None, None, :]
        local = F.pad(local, (0, keys - local.shape[-1]))
        total = local if total is None else total + local
    return total


def _additive(mask: T, dtype: torch.dtype) -> T:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _gathered(weights: T, group: Group, num_heads: int, average: bool) -> T:
    """The weights [batch, this rank's heads, queries, keys] of all heads, or their mean over heads."""
    if average:
        return ops.reduce(weights.sum(1), group) / num_heads
    return ops.gather(weights, group, dim=1, full=num_heads, gradient="replicate")


# -- ulysses attention -----------------------------------------------------------------------------------------------
# The style `ulysses`: attention of a stock module inside the sequence-parallel region, by all-to-alls over `tp`. The
# module's projections are replicated and compute this rank's tokens. All-to-alls exchange the sequence shard for a
# head shard around `scaled_dot_product_attention`, which computes all tokens of this rank's heads; a mask or a causal
# flag of the full sequence needs no change. What the decoder computes for the full sequence outside the region, such
# as rotary tables, is named in the rule, `ulysses(position_embeddings)`, and split to this rank's tokens. Source:
# Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.


def ulysses_attention(module: nn.Module, split: tuple[str, ...]) -> Callable[..., Any]:
    """A forward that exchanges tokens for heads where the module calls `scaled_dot_product_attention`.

    Args:
        split: arguments of the forward with values for the full sequence, which are split to this rank's tokens.

    Raises: ModelError `no-such-argument`; from the forward, `no-attention-call`, `wrong-rows`.
    """
    hidden, split_arguments = argument_of(module, ""), [argument_of(module, name) for name in split]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        planned = self._applied.planned
        region = planned.region
        x = args[0] if args else kwargs[hidden[1]]
        if not region.gathers(x, region.dim):  # one token is decoded: nothing is sharded
            return on_local_parameters(self, planned, args, kwargs)
        full = region.gathered_size(x, region.dim)

        def local(value: T) -> T:
            is_full = isinstance(value, T) and value.ndim > region.dim and value.shape[region.dim] == full
            return ops.split(value, region.group, region.dim, padded=True) if is_full else value

        for argument in split_arguments:
            args, kwargs = convert_argument(lambda value: private.tree_map(local, value), argument, args, kwargs)
        attention = _ExchangedAttention(self, region, full)
        with AttentionCalls(attention.attend, attention.attend_flex):
            out = on_local_parameters(self, planned, args, kwargs)
        attention.check()
        return out

    return forward


def check_ulysses(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `attention-by-hand` where a `transformers` model is configured for attention without PyTorch's
    op."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if implementation != "sdpa":
        what = f"{fqn} computes attention by {implementation!r}, which never calls F.scaled_dot_product_attention"
        raise ModelError(Problem("attention-by-hand", what, fix='build the model with attn_implementation="sdpa"'))


class _ExchangedAttention:
    """The attention function of one forward, with all tokens of this rank's heads."""

    def __init__(self, module: nn.Module, region: Region, full: int):
        self.module, self.group, self.full = type(module).__name__, region.group, full
        self.called = False
        intervals = [even_interval(full, self.group.size, rank) for rank in range(self.group.size)]
        self.tokens = [stop - start for start, stop in intervals]

    def attend(self, *args: Any, **kwargs: Any) -> T:
        self.called = True
        with private.plain_calls():
            return self._attend(*args, **kwargs)

    def attend_flex(
        self, query: T, key: T, value: T, score_mod: Any, block_mask: Any, scale: Any, _: bool, *options: Any
    ) -> Any:
        """`flex_attention`, whose functions get the numbers of this rank's heads."""
        self.called = True
        heads, (q, k, v) = self._to_heads(query, key, value)
        if not q.shape[1]:
            what = f"a {self.module} calls flex_attention with {query.shape[1]} heads on {self.group.size} ranks"
            raise ModelError(Problem("uneven-heads", what, fix="as many heads as ranks of tp, or more"))
        numbers = Numbers(heads.queries[self.group.rank][0])
        mask = local_mask(block_mask, numbers, q.shape[2], q.shape[1])
        out = call_flex_attention(q, k, v, renumbered_scores(score_mod, numbers), mask, scale, True, *options)
        if isinstance(out, tuple):
            what = f"a {self.module} under `ulysses` asks flex_attention for its log-sums"
            raise ModelError(
                Problem("attention-argument", what, fix="`gather` and `colwise` in the place of `ulysses`")
            )
        return self._to_tokens(out, heads, query.shape[2])

    def _attend(self, query: T, key: T, value: T, attn_mask: T | None = None, *rest: Any, **others: Any) -> T:
        heads, (q, k, v) = self._to_heads(query, key, value)
        if not q.shape[1]:  # fewer heads than ranks: this rank takes part in the collectives of backward
            out = q.new_zeros((*q.shape[:3], v.shape[3])) + (q.sum() + k.sum() + v.sum())
        else:
            mask = _local_mask(attn_mask, query.shape[1], *heads.queries[self.group.rank])
            options = {name: value for name, value in others.items() if name != "enable_gqa"}
            if q.shape[1] != k.shape[1]:
                options["enable_gqa"] = True
            out = F.scaled_dot_product_attention(q, k, v, mask, *rest, **options)
        return self._to_tokens(out, heads, query.shape[2])

    def _to_heads(self, query: T, key: T, value: T) -> tuple[HeadSplit, tuple[T, T, T]]:
        size, shard_size = self.group.size, query.shape[2]
        if query.ndim != 4 or shard_size != -(-self.full // size) or key.shape[2] != shard_size:
            what = (
                f"a {self.module} attends with {list(query.shape)} to {list(key.shape)}; {self.full} tokens are "
                f"sharded over {size} ranks"
            )
            raise ModelError(Problem("wrong-rows", what, fix="self-attention of [batch, heads, tokens, width]"))
        heads = HeadSplit.of(query.shape[1], key.shape[1], size)
        query, key, value = (x.narrow(2, 0, self.tokens[self.group.rank]) for x in (query, key, value))
        return heads, to_head_shards(query, key, value, self.group, heads, self.tokens)

    def _to_tokens(self, out: T, heads: HeadSplit, shard_size: int) -> T:
        return ops.pad_to(to_sequence_shards(out, self.group, heads, self.tokens), 2, shard_size)

    def check(self) -> None:
        if not self.called:
            what = f"a {self.module} under `ulysses` never calls F.scaled_dot_product_attention or flex_attention"
            fix = "the sdpa attention of transformers, or a rule on the module that does call it"
            raise ModelError(Problem("no-attention-call", what, fix=fix))


def _local_mask(mask: T | None, num_heads: int, start: int, stop: int) -> T | None:
    """The mask of this rank's heads, where the mask [.., heads, tokens, tokens] differs between heads."""
    if mask is None or mask.ndim < 3 or mask.shape[-3] != num_heads or num_heads == 1:
        return mask
    return mask.narrow(-3, start, stop - start)
