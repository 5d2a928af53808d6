"""`nn.MultiheadAttention` over `tp`: the style `multihead`, which shards it by heads, and `replicate`.

Its stock forward passes weights, those of `out_proj` among them, to one function that takes all heads. A sharded module runs the
same arithmetic on this rank's heads, and calls `out_proj`, which its own rule shards by rows. A replicated one runs its stock
forward on local tensors.

Source: Vaswani et al., arXiv:1706.03762; the masks and options are those of `torch.nn.MultiheadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.tensor.planned_forward import ModuleRuntime, installed, on_local_parameters
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops

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


def sharded_multihead(group: Group) -> Callable:
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
    """[batch, length, features] of query, key and value -> [batch, this rank's heads, length, width of a head] of each."""
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
        attention: [queries, keys], or [batch * all heads, queries, keys]. padding: [batch, keys]. Of booleans, True hides.
            Keys beyond theirs, of `bias_k` and of zeros, are seen.
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
