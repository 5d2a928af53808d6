"""Images, and texts with the tokens that images take the place of, for models that read both."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

T = torch.Tensor
BATCH, LENGTH = 2, 11
_TOKENS = ("image_token_id", "image_token_index")
_GRID = 4  # patches of an image along each side, where they are passed as rows


def image(config: Any) -> T:
    """[batch, channels, height, width]"""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 32
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(BATCH, int(getattr(vision, "num_channels", 3)), int(height), int(width))


def masking(model: nn.Module) -> dict[str, Any]:
    """Numbers that decide which patches of an image are masked, [batch, patches], where a forward would draw them."""
    config: Any = model.config
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    takes_noise = "noise" in inspect.signature(model.forward).parameters
    if not takes_noise or type(size) is not int or type(patch) is not int:
        return {}
    return {"noise": torch.rand(BATCH, (size // patch) ** 2)}


def has_images(model: nn.Module) -> bool:
    """Whether a model of `transformers` puts features of images in the place of tokens of a text."""
    takes_images = "pixel_values" in inspect.signature(model.forward).parameters
    return takes_images and callable(getattr(model, "get_image_features", None)) and _image_token(model) is not None


def images_in_text(model: nn.Module) -> dict[str, Any]:
    """One image in each text: the model itself says how many tokens it takes."""
    images, features = _accepted(model)
    token = _image_token(model) or 0
    ids = text_around(model.config, features, token)
    inputs = {"input_ids": ids, **images, "use_cache": False}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = ids.eq(token).long()
    return inputs


def text_around(config: Any, features: Any, token: int) -> T:
    """Ids [batch, length], in which `token` stands as often as there are features for each text."""
    count = sum(_rows(tensor) for tensor in _tensors(features)) // BATCH
    text = getattr(config, "text_config", None) or config
    ids = torch.randint(3, int(text.vocab_size) // 2, (BATCH, LENGTH + count))
    ids[:, 2 : 2 + count] = token
    return ids


def _image_token(model: nn.Module) -> int | None:
    values = (getattr(model.config, name, None) for name in _TOKENS)
    return next((value for value in values if isinstance(value, int)), None)


@torch.no_grad()
def _accepted(model: nn.Module) -> tuple[dict[str, Any], Any]:
    """The first form of images that the model takes, and their features. Raises: what the model raises for the first one."""
    reason: Exception | None = None
    for images in _images(model):
        try:
            return images, model.get_image_features(**images)  # type: ignore[operator]
        except Exception as error:  # of code of any model
            reason = reason or error
    assert reason is not None
    raise reason


def _images(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Images in the forms that models take: as pixels, or as rows of patches with a grid for each image."""
    names = inspect.signature(model.get_image_features).parameters  # type: ignore[arg-type]
    if "image_grid_thw" in names:
        rows = _rows_of(model.config)
        yield {"pixel_values": rows, "image_grid_thw": _grids()}
        side = math.isqrt(rows.shape[1] // 3)
        yield {"pixel_values": rows[:, : 3 * side**2].reshape(-1, 3, side, side), "image_grid_thw": _grids()}
        return
    pixels = image(model.config)
    sizes = {"image_sizes": torch.tensor([pixels.shape[2:]] * BATCH)} if "image_sizes" in names else {}
    yield {"pixel_values": pixels, **sizes}
    seen = torch.ones(BATCH, 1, *pixels.shape[2:], dtype=torch.bool)
    for mask in ({}, {"pixel_attention_mask": seen}, {"pixel_attention_mask": seen[:, :, 0, 0]}):  # images of each text
        if mask.keys() <= names.keys():
            yield {"pixel_values": pixels[:, None], **sizes, **mask}


def rows_of_patches(model: nn.Module) -> dict[str, Any]:
    """What a vision tower takes: rows of patches, under the name of its first argument, with a grid for each image."""
    first = next(iter(inspect.signature(model.forward).parameters))
    return {first: _rows_of(model.config), "grid_thw": _grids()}


def _grids() -> T:
    return torch.tensor([[1, _GRID, _GRID]] * BATCH)


def _rows_of(config: Any) -> T:
    """[patches of all images, channels x frames x height x width of a patch]"""
    vision: Any = getattr(config, "vision_config", None) or config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next((size for name in names if (size := getattr(vision, name, None))), 3)
    size = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return torch.randn(BATCH * _GRID**2, size)


def _tensors(features: Any) -> Iterator[T]:
    """The features that replace tokens: those that were pooled, where a model returns others too."""
    pooled = getattr(features, "pooler_output", None)
    values = features if pooled is None else pooled
    if isinstance(values, Mapping):
        values = next(iter(values.values()))
    yield from [values] if isinstance(values, T) else values


def _rows(features: T) -> int:
    return features.shape[:-1].numel()
