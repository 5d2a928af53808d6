"""Key/value caches of `transformers` that a new token is written into, instead of being copied with every token before it.

`DynamicLayer` concatenates: with S tokens in the cache, a new one costs a copy of S. Here its tensors are views of the first S tokens
of larger ones. All else of the layer, such as its lengths for masks, is read from these views and is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

T = torch.Tensor
_SERVED = "transformers.cache_utils.DynamicLayer"  # others slide, or store something else: they are left as they are


def reserve(cache: Any, length: int) -> None:
    """Let the layers of a cache that has its prompt grow in place, up to `length` tokens.

    Args:
        cache: any cache; layers of it that are not plain `DynamicLayer`s are not changed.
        length: tokens of the longest possible sequence. Memory for them is taken as the cache grows.
    """
    for layer in getattr(cache, "layers", ()):
        cls = type(layer)
        is_plain = f"{cls.__module__}.{cls.__name__}" == _SERVED and "update" not in vars(layer)
        if is_plain and are_tokens(layer.keys) and are_tokens(layer.values):
            layer.update = _Growing(layer, length).update


def are_tokens(x: Any) -> bool:
    """Whether these are keys or values of tokens, [B, heads, tokens, head_dim], in a plain tensor."""
    return type(x) is T and x.ndim == 4 and not x.requires_grad


class _Growing:
    """One layer's memory: [B, heads, room, head_dim] for keys and for values, of which the layer shows the first tokens."""

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
