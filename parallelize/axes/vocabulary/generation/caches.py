"""Key/value caches of `transformers` that a new token is written into: growing ones, and fixed ones for captured
decoding.

`DynamicLayer` concatenates: with S tokens in the cache, a new one costs a copy of S. Here its tensors are views of the
first S tokens of larger ones. All else of the layer, such as its lengths for masks, is read from these views and is
unchanged.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

T = torch.Tensor
_GROWING_LAYER = (
    "transformers.cache_utils.DynamicLayer"  # others slide, or store something else: they are left as they are
)


def reserve(cache: Any, length: int) -> None:
    """Let the layers of a cache that has its prompt grow in place, up to `length` tokens.

    Args:
        cache: any cache; layers of it that are not plain `DynamicLayer`s are not changed.
        length: tokens of the longest possible sequence. Memory for them is taken as the cache grows.
    """
    for layer in getattr(cache, "layers", ()):
        cls = type(layer)
        is_plain = f"{cls.__module__}.{cls.__name__}" == _GROWING_LAYER and "update" not in vars(layer)
        if is_plain and are_tokens(layer.keys) and are_tokens(layer.values):
            layer.update = _Growing(layer, length).update


def are_tokens(x: Any) -> bool:
    """Whether these are keys or values of tokens, [B, heads, tokens, head_dim], in a plain tensor."""
    return type(x) is T and x.ndim == 4 and not x.requires_grad


class _Growing:
    """One layer's memory: [B, heads, room, head_dim] for keys and for values, of which the layer shows the first
    tokens."""

    def __init__(self, layer: Any, length: int):
        self.layer, self.length = layer, length
        self.keys, self.values = layer.keys, layer.values

    def update(self, keys: T, values: T, *args: Any, **kwargs: Any) -> tuple[T, T]:
        """`DynamicLayer.update`: [B, heads, n, head_dim] new keys and values; returns those of all tokens."""
        layer = self.layer
        shown = layer.keys, layer.values
        if not (_continues(keys, shown[0], self.keys) and _continues(values, shown[1], self.values)):
            return type(layer).update(layer, keys, values, *args, **kwargs)  # changed by somebody else
        start = shown[0].shape[-2]
        stop = start + keys.shape[-2]
        if stop > self.keys.shape[-2]:
            room = max(stop, min(2 * stop, self.length))
            self.keys, self.values = _with_room(shown[0], room), _with_room(shown[1], room)
        self.keys[:, :, start:stop].copy_(keys)
        self.values[:, :, start:stop].copy_(values)
        layer.keys, layer.values = self.keys[:, :, :stop], self.values[:, :, :stop]
        return layer.keys, layer.values


def _continues(new: T, shown: Any, memory: T) -> bool:
    """Whether new tokens belong behind those that a layer shows, which are the first of `memory`."""
    if not are_tokens(shown) or shown.data_ptr() != memory.data_ptr() or shown.stride() != memory.stride():
        return False
    same_rows = new.shape[:2] == shown.shape[:2] and new.shape[3] == shown.shape[3]
    return same_rows and new.dtype == shown.dtype and new.device == shown.device


def _with_room(x: T, room: int) -> T:
    larger = x.new_empty((*x.shape[:2], room, x.shape[3]))
    larger[:, :, : x.shape[2]].copy_(x)
    return larger


# -- fixed cache -----------------------------------------------------------------------------------------------------
# A key/value cache of `transformers` whose tensors keep their addresses and shapes, so that a CUDA graph can read and
# write it. It is made of a cache that has its prompt. Its layers are `StaticLayer`s, whose length is a tensor on the
# device: the model's forward takes positions and masks from it. Layers that slide over a window get all tokens here
# too; the model's masks hide the old ones.


_HIDDEN = 64.0  # value of empty places: 0 times it is 0, and attention that does not mask them gives far other outputs
_FIXED_LAYERS = {f"transformers.cache_utils.{name}" for name in ("DynamicLayer", "DynamicSlidingWindowLayer")}


def why_not_fixed(key_values: Any, tokens: int) -> str:
    """Why `with_fixed_room` does not serve a cache of a prompt of `tokens` tokens, in words that follow a model's name;
    or ""."""
    layers = getattr(key_values, "layers", None) or []
    if not layers or not all(_is_served(layer, tokens) for layer in layers):
        return (
            "has a cache with layers other than transformers' DynamicLayer and DynamicSlidingWindowLayer of the "
            "prompt's tokens"
        )
    if _static_layer() is None:
        return "is of a version of transformers whose StaticLayer does not count its tokens on the device"
    return ""


def with_fixed_room(key_values: Any, tokens: int, room: int) -> Any:
    """A cache of the same `tokens` tokens with room for `room`.

    Args:
        key_values: a cache that `why_not_fixed` has no reason against, which is not changed; or one that this function
            returned, whose layers are emptied one by one.
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
    if kind not in _FIXED_LAYERS or getattr(layer, "record_past", False):
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
