"""How the attention of stock modules is met: by the interface of `transformers`, or at `scaled_dot_product_attention` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.context.attend import attend, masking_of
from parallelize.context.state import Attention
from parallelize.errors import ModelError, Problem

T = torch.Tensor
NAME = "parallelize_context"  # of our attention in the registry of `transformers`


def register() -> None:
    """Make our attention known to `transformers`. Models get no mask tensors under a name that has no mask function."""
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
    **others: Any,
) -> tuple[T, None]:
    """As `transformers` calls attention: [B, H, s, D] in, [B, s, H, E] out.

    Raises: ModelError `unplanned-attention`, `given-mask`, `attention-dropout`, `attention-argument`.
    """
    site = _site(module)
    if attention_mask is not None:
        raise _given_mask(site.fqn)
    _refuse_dropout(site, dropout)
    for name, value_given in others.items():
        if name in _CHANGES_ATTENTION and value_given is not None:
            what = f"{site.fqn} gives its attention {name}, which is not known over cp"
            raise ModelError(Problem("attention-argument", what, fix="leave this model off cp"))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    masking = masking_of(site, causal, sliding_window, scaling, softcap, query)
    return attend(site, query, key, value, masking).transpose(1, 2).contiguous(), None


_CHANGES_ATTENTION = ("s_aux", "position_bias", "head_mask", "cache", "cu_seq_lens_q", "block_table")


class Rerouted(TorchFunctionMode):
    """While it is on, `scaled_dot_product_attention` is that of one module over cp."""

    def __init__(self, site: Attention):
        super().__init__()
        self.site = site

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _sdpa(self.site, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def rerouted(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention module that calls `scaled_dot_product_attention`."""
    site = self.__dict__["_parallelize_attention"]
    with Rerouted(site):
        if site.stock is None:
            return type(self).forward(self, *args, **kwargs)
        return site.stock(*args, **kwargs)


def _sdpa(
    site: Attention,
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    if attn_mask is not None:
        raise _given_mask(site.fqn)
    if query.ndim != 4:
        what = f"{site.fqn} attends with queries {list(query.shape)}"
        raise ModelError(Problem("wrong-rows", what, fix="attention over cp takes [batch, heads, rows, width]"))
    _refuse_dropout(site, dropout_p)
    return attend(site, query, key, value, masking_of(site, is_causal, None, scale, None, query))


class Unmet(TorchFunctionMode):
    """While it is on, attention that no rule of the plan names is an error: it would see this rank's rows alone."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            fix = "name its module under `attention:` in the plan"
            raise ModelError(Problem("unplanned-attention", "attention runs in a module that no rule names", fix=fix))
        return func(*args, **(kwargs or {}))


def _site(module: nn.Module) -> Attention:
    site = module.__dict__.get("_parallelize_attention")
    if site is None:
        what = f"a {type(module).__name__} calls attention, and no rule of the plan names it"
        raise ModelError(Problem("unplanned-attention", what, fix="name it under `attention:`"))
    return site


def _given_mask(fqn: str) -> ModelError:
    what = f"{fqn} is called with a mask, which has the rows of this rank alone"
    fix = "a causal flag, a window, packed position ids or a padding mask [batch, rows] given to the model"
    return ModelError(Problem("given-mask", what, fix=fix))


def _refuse_dropout(site: Attention, p: float) -> None:
    if p:
        what = f"{site.fqn} drops attention weights (p = {p})"
        raise ModelError(Problem("attention-dropout", what, fix="attention dropout 0: it is not known over cp"))
