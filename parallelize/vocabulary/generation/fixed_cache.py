"""A key/value cache of `transformers` whose tensors keep their addresses and shapes, so that a CUDA graph can read and write it.

It is made of a cache that has its prompt. Its layers are `StaticLayer`s, whose length is a tensor on the device: the model's forward
takes positions and masks from it. Layers that slide over a window get all tokens here too; the model's masks hide the old ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

T = torch.Tensor
_SERVED = {f"transformers.cache_utils.{name}" for name in ("DynamicLayer", "DynamicSlidingWindowLayer")}


def can_be_fixed(key_values: Any) -> bool:
    """Whether all layers of a cache have keys and values of tokens, of known layouts, for `with_fixed_room`."""
    layers = getattr(key_values, "layers", None) or []
    return bool(layers) and all(map(_is_served, layers)) and _static_layer() is not None


def with_fixed_room(key_values: Any, tokens: int, room: int) -> Any:
    """A cache of the same `tokens` tokens with room for `room`.

    Args:
        key_values: a cache for which `can_be_fixed`, or one that this function returned.
        tokens: how many tokens were written to it. A sliding layer has the last of them.
    """
    from transformers.cache_utils import Cache

    return Cache(layers=[_fixed(layer, tokens, room) for layer in key_values.layers])


def set_length(key_values: Any, tokens: int) -> None:
    """Let a cache of `with_fixed_room` have its first `tokens` tokens only."""
    for layer in key_values.layers:
        layer.cumulative_length.fill_(tokens)


@cache
def _static_layer() -> Any:
    """`StaticLayer`, if it counts its tokens on the device as those of transformers 5 do, else None."""
    from transformers.cache_utils import StaticLayer

    has_count = isinstance(getattr(StaticLayer(max_cache_len=1), "cumulative_length", None), T)
    return StaticLayer if has_count else None


def _is_served(layer: Any) -> bool:
    is_known = f"{type(layer).__module__}.{type(layer).__name__}" in _SERVED
    return (
        is_known and _are_tokens(layer.keys) and _are_tokens(layer.values) and not getattr(layer, "record_past", False)
    )


def _are_tokens(x: Any) -> bool:
    return type(x) is T and x.ndim == 4 and not x.requires_grad


def _fixed(layer: Any, tokens: int, room: int) -> Any:
    fixed = _static_layer()(max_cache_len=room)
    shown = min(tokens, layer.keys.shape[-2])
    has_room = isinstance(layer, _static_layer())  # its tokens are the first ones, those of other layers the last ones
    fixed.lazy_initialization(layer.keys[:, :, :1], layer.values[:, :, :1])
    for new, old in ((fixed.keys, layer.keys), (fixed.values, layer.values)):
        new[:, :, tokens - shown : tokens].copy_(old[:, :, :shown] if has_room else old[:, :, -shown:])
    fixed.cumulative_length.fill_(tokens)
    return fixed
