"""Images, and texts with the tokens that images take the place of, for models that read both."""

from __future__ import annotations

import inspect
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
    images = _images(model)
    with torch.no_grad():
        features = model.get_image_features(**images)  # type: ignore[operator]
    count = sum(_rows(tensor) for tensor in _tensors(features)) // BATCH
    config: Any = model.config
    text = getattr(config, "text_config", None) or config
    ids = torch.randint(3, int(text.vocab_size) // 2, (BATCH, LENGTH + count))
    ids[:, 2 : 2 + count] = _image_token(model) or 0
    inputs = {"input_ids": ids, **images, "use_cache": False}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = ids.eq(_image_token(model) or 0).long()
    return inputs


def _image_token(model: nn.Module) -> int | None:
    values = (getattr(model.config, name, None) for name in _TOKENS)
    return next((value for value in values if isinstance(value, int)), None)


def _images(model: nn.Module) -> dict[str, Any]:
    """Images as the model takes them: as pixels, or as rows of patches with a grid for each image."""
    names = inspect.signature(model.get_image_features).parameters  # type: ignore[arg-type]
    if "image_grid_thw" not in names:
        pixels = image(model.config)
        sizes = torch.tensor([pixels.shape[2:]] * BATCH)
        return {"pixel_values": pixels, **({"image_sizes": sizes} if "image_sizes" in names else {})}
    return {"pixel_values": _rows_of(model.config), "image_grid_thw": _grids()}


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
