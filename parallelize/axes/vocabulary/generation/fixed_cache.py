"""A key/value cache of `transformers` whose tensors keep their addresses and shapes, so that a CUDA graph can read and write it.

It is made of a cache that has its prompt. Its layers are `StaticLayer`s, whose length is a tensor on the device: the model's forward
takes positions and masks from it. Layers that slide over a window get all tokens here too; the model's masks hide the old ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from parallelize.axes.vocabulary.generation.growing_cache import are_tokens

T = torch.Tensor
_HIDDEN = 64.0  # value of empty places: 0 times it is 0, and attention that does not mask them gives far other outputs
_SERVED = {f"transformers.cache_utils.{name}" for name in ("DynamicLayer", "DynamicSlidingWindowLayer")}


def why_not_fixed(key_values: Any, tokens: int) -> str:
    """Why `with_fixed_room` does not serve a cache of a prompt of `tokens` tokens, in words that follow a model's name; or ""."""
    layers = getattr(key_values, "layers", None) or []
    if not layers or not all(_is_served(layer, tokens) for layer in layers):
        return "has a cache with layers other than transformers' DynamicLayer and DynamicSlidingWindowLayer of the prompt's tokens"
    if _static_layer() is None:
        return "is of a version of transformers whose StaticLayer does not count its tokens on the device"
    return ""


def with_fixed_room(key_values: Any, tokens: int, room: int) -> Any:
    """A cache of the same `tokens` tokens with room for `room`.

    Args:
        key_values: a cache that `why_not_fixed` has no reason against, which is not changed; or one that this function returned,
            whose layers are emptied one by one.
        tokens: how many tokens were written to it. A sliding layer has the last of them.
    """
    from transformers.cache_utils import Cache

    layers = []
    for layer in key_values.layers:
        layers.append(_fixed(layer, tokens, room))
        if isinstance(layer, _static_layer()):
            layer.keys = layer.values = None
    return Cache(layers=layers)


def set_length(key_values: Any, tokens: int) -> None:
    """Let a cache of `with_fixed_room` have its first `tokens` tokens only."""
    for layer in key_values.layers:
        layer.cumulative_length.fill_(tokens)


@cache
def _static_layer() -> Any:
    """`StaticLayer`, if it counts its tokens on the device (5.23 does, 5.0 does not), else None."""
    from transformers.cache_utils import StaticLayer

    has_count = isinstance(getattr(StaticLayer(max_cache_len=1), "cumulative_length", None), T)
    return StaticLayer if has_count else None


def _is_served(layer: Any, tokens: int) -> bool:
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if kind not in _SERVED or getattr(layer, "record_past", False):
        return False
    if not (are_tokens(layer.keys) and are_tokens(layer.values)):
        return False
    return "Sliding" in kind or layer.keys.shape[-2] == tokens


def _fixed(layer: Any, tokens: int, room: int) -> Any:
    fixed = _static_layer()(max_cache_len=room)
    num_stored = min(tokens, layer.keys.shape[-2])
    is_fixed = isinstance(layer, _static_layer())  # its tokens are the first ones, those of other layers the last ones
    fixed.lazy_initialization(layer.keys[:, :, :1], layer.values[:, :, :1])
    fixed.values.fill_(_HIDDEN)
    for new, old in ((fixed.keys, layer.keys), (fixed.values, layer.values)):
        new[:, :, tokens - num_stored : tokens].copy_(old[:, :, :num_stored] if is_fixed else old[:, :, -num_stored:])
    fixed.cumulative_length.fill_(tokens)
    return fixed
