"""How the attention of stock modules is intercepted: by the interface of `transformers`, or at `scaled_dot_product_attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.context.attention import attend, masking_of
from parallelize.axes.context.forward_state import Context, ContextAttention, attention_of
from parallelize.axes.tensor.attention_calls import AttentionCalls
from parallelize.base.errors import ModelError, Problem
from parallelize.ops.attention.weight_dropout import WeightDropout
from parallelize.state.randomness.dropout.call_sites import ModuleDropout
from parallelize.state.records import applied
from parallelize.state.step_results import expected

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
    planned = _planned_attention(module)
    if attention_mask is not None:
        raise _mask_refused(planned.fqn)
    for name, argument in others.items():
        if name in _CHANGES_ATTENTION and argument is not None:
            what = f"{planned.fqn} passes {name} to its attention, which is not supported over cp"
            raise ModelError(Problem("attention-argument", what, fix="leave this model off cp"))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    masking = masking_of(planned, query, causal=causal, window=sliding_window, scale=scaling, softcap=softcap)
    drops = _dropout_of(module, planned, query, key, dropout)
    return attend(planned, query, key, value, masking, drops, s_aux).transpose(1, 2).contiguous(), None


def forward_over_context(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention module that calls `scaled_dot_product_attention`."""
    planned = self._applied.attention
    with AttentionCalls(partial(_sdpa, self, planned)):
        if planned.stock is None:
            return type(self).forward(self, *args, **kwargs)
        return planned.stock(*args, **kwargs)


def _sdpa(
    module: nn.Module,
    planned: ContextAttention,
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
        raise _mask_refused(planned.fqn)
    if query.ndim != 4:
        what = f"{planned.fqn} attends with queries {list(query.shape)}"
        raise ModelError(Problem("wrong-rows", what, fix="attention over cp takes [batch, heads, tokens, width]"))
    masking = masking_of(planned, query, causal=is_causal, window=None, scale=scale, softcap=None)
    return attend(planned, query, key, value, masking, _dropout_of(module, planned, query, key, dropout_p))


def refuse_unplanned(context: Context, *args: Any, **kwargs: Any) -> T:
    """Attention in a module that the plan does not name, which would see local tokens only. Raises: ModelError."""
    if context.runs_gathered:
        return F.scaled_dot_product_attention(*args, **kwargs)
    fix = "name its module under `attention:` in the plan"
    raise ModelError(Problem("unplanned-attention", "attention runs in a module that no rule names", fix=fix))


def _planned_attention(module: nn.Module) -> ContextAttention:
    planned = attention_of(module)
    if planned is None:
        what = f"a {type(module).__name__} calls attention, and no rule of the plan names it"
        raise ModelError(Problem("unplanned-attention", what, fix="name it under `attention:`"))
    return planned


def _mask_refused(fqn: str) -> ModelError:
    what = f"{fqn} is called with a mask, which covers the tokens of this rank only"
    fix = "a causal flag, a window, packed position ids, or a padding mask [batch, tokens] passed to the model"
    return ModelError(Problem("given-mask", what, fix=fix))


def _dropout_of(module: nn.Module, planned: ContextAttention, query: T, key: T, p: float) -> WeightDropout | None:
    """The dropout of the attention weights of a call, whose number among the module's calls is that of the unsharded model.

    Raises: ModelError `attention-dropout` where no global mask is installed for this module.
    """
    if not p or query.is_meta:  # a trace has no values to drop
        return None
    dropout = expected(applied(module).dropout, ModuleDropout)
    if dropout is None or not dropout.sites.scopes:
        what = f"{planned.fqn} drops attention weights (p = {p}), and nothing says which"
        fix = "install_dropout(model, seed) after the model is put on cp; or a rate of 0"
        raise ModelError(Problem("attention-dropout", what, fix=fix))
    return dropout.sites.of_weights(dropout.sites.scopes[-1].call_site(), query, key, p)
