"""Images, and texts with the tokens that images take the place of, for models that read both."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

T = torch.Tensor
BATCH, LENGTH = 2, 11
_TOKENS = ("image_token_id", "image_token_index")
_PLACES, _QUERIES = "image_embeds_position_mask", "latent_query_num"
_TOKEN_ENDS = ("token_id", "token_index")
_FUNCTION = "get_image_features"
_GRID = 4  # patches of an image along each side, where they are passed as rows


def image(config: Any, batch: int = BATCH) -> T:
    """[batch, channels, height, width]"""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 32
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(batch, int(getattr(vision, "num_channels", 3)), int(height), int(width))


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
    if _is_told_places(model):
        return True
    takes_images = "pixel_values" in inspect.signature(model.forward).parameters
    return takes_images and features_function(model, _FUNCTION) is not None and _image_token(model) is not None


def features_function(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """The function of a model, or of the model below its head, that returns the features of images or of sound."""
    models = (model, getattr(model, "base_model", None))
    return next((function for candidate in models if callable(function := getattr(candidate, name, None))), None)


def images_in_text(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    """One image in each text: the model itself says how many tokens it takes.

    batch: of texts. length: of a text, in tokens besides those of its image.
    """
    if _is_told_places(model):
        return _images_at_places(model, batch, length)
    images, features = _accepted(model, batch)
    token = _image_token(model) or 0
    ids = text_around(model.config, features, token, batch, length)
    inputs = {"input_ids": ids, **images, "use_cache": False}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = ids.eq(token).long()
    return inputs


def text_around(config: Any, features: Any, token: int, batch: int = BATCH, length: int = LENGTH) -> T:
    """Ids [batch, length and features of a text], in which `token` stands as often as there are features for each
    text."""
    count = sum(_rows(tensor) for tensor in _tensors(features)) // batch
    text = getattr(config, "text_config", None) or config
    plain = plain_tokens(config, int(text.vocab_size) // 2)
    ids = plain[torch.randint(0, len(plain), (batch, length + count))]
    ids[:, 2 : 2 + count] = token
    return ids


def _is_told_places(model: nn.Module) -> bool:
    """Whether an argument of the forward says which tokens of a text the queries of an image replace."""
    counts_queries = type(getattr(model.config, _QUERIES, None)) is int
    return counts_queries and _PLACES in inspect.signature(model.forward).parameters


def _images_at_places(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """One image in each text, as pixels or as patches with their places."""
    config: Any = model.config
    count = getattr(config, _QUERIES)
    text = getattr(config, "text_config", None) or config
    plain = plain_tokens(config, int(text.vocab_size))
    ids = plain[torch.randint(0, len(plain), (batch, length + count))]
    places = torch.zeros_like(ids)
    places[:, 1 : 1 + count] = 1
    patches = patches_with_places(config, batch)
    images = {"pixel_values": image(config, batch)} if patches is None else {"flattened_patches": patches}
    return {"input_ids": ids, **images, _PLACES: places, "use_cache": False}


def patches_with_places(config: Any, batch: int = BATCH) -> T | None:
    """[batch, patches, row and column of a patch with its pixels]: they count from 1. None: the model reads other
    images."""
    width = getattr(getattr(config, "vision_config", None), "patch_embed_hidden_size", None)
    if type(width) is not int:
        return None
    patches = torch.randn(batch, LENGTH, 2 + width)
    patches[..., :2] = torch.arange(1, LENGTH + 1)[:, None]
    return patches


def plain_tokens(config: Any, most: int) -> T:
    """Tokens below `most` that stand for nothing else."""
    special = {value for name, value in vars(config).items() if name.endswith(_TOKEN_ENDS) and type(value) is int}
    return torch.tensor([token for token in range(3, most) if token not in special])


def _image_token(model: nn.Module) -> int | None:
    values = (getattr(model.config, name, None) for name in _TOKENS)
    return next((value for value in values if isinstance(value, int)), None)


@torch.no_grad()
def _accepted(model: nn.Module, batch: int) -> tuple[dict[str, Any], Any]:
    """The first form of images that the model takes, and their features. Raises: what the model raises for the first
    one."""
    features_of: Any = features_function(model, _FUNCTION)
    reason: Exception | None = None
    for images in _images(model.config, batch, inspect.signature(features_of).parameters):
        try:
            return images, features_of(**images)
        except Exception as error:  # of code of any model
            reason = reason or error
    assert reason is not None
    raise reason


@torch.no_grad()
def accepts_images(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the model returns features of the images among its inputs."""
    features_of: Any = features_function(model, _FUNCTION)
    names = inspect.signature(features_of).parameters
    try:
        features_of(**{name: value for name, value in inputs.items() if name in names})
    except Exception:  # of code of any model
        return False
    return True


def _images(config: Any, batch: int, names: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Images in the forms that models take: as pixels, or as rows of patches with a grid for each image."""
    if "image_grid_thw" in names:
        rows, grids = _rows_of(config, batch), _grids(batch)
        yield {"pixel_values": rows, "image_grid_thw": grids}
        side = math.isqrt(rows.shape[1] // 3)
        yield {"pixel_values": rows[:, : 3 * side**2].reshape(-1, 3, side, side), "image_grid_thw": grids}
        return
    pixels = image(config, batch)
    sizes = {"image_sizes": torch.tensor([pixels.shape[2:]] * batch)} if "image_sizes" in names else {}
    for name in names:  # of another tower, such as `high_res_pixel_values`
        tower = getattr(config, f"{name.removesuffix('pixel_values')}vision_config", None)
        if name.endswith("_pixel_values") and tower is not None:
            sizes[name] = image(tower, batch)
    yield {"pixel_values": pixels, **sizes}
    seen = torch.ones(batch, 1, *pixels.shape[2:], dtype=torch.bool)
    for mask in ({}, {"pixel_attention_mask": seen}, {"pixel_attention_mask": seen[:, :, 0, 0]}):  # images of each text
        if mask.keys() <= names.keys():
            yield {"pixel_values": pixels[:, None], **sizes, **mask}


def rows_of_patches(model: nn.Module) -> dict[str, Any]:
    """What a vision tower takes: rows of patches, under the name of its first argument, with a grid for each image."""
    first = next(iter(inspect.signature(model.forward).parameters))
    return {first: _rows_of(model.config, BATCH), "grid_thw": _grids(BATCH)}


def _grids(batch: int) -> T:
    return torch.tensor([[1, _GRID, _GRID]] * batch)


def _rows_of(config: Any, batch: int) -> T:
    """[patches of all images, channels x frames x height x width of a patch]"""
    vision: Any = getattr(config, "vision_config", None) or config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next((size for name in names if (size := getattr(vision, name, None))), 3)
    size = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return torch.randn(batch * _GRID**2, size)


def _tensors(features: Any) -> Iterator[T]:
    """The features that replace tokens: those that were pooled, where a model returns others too."""
    pooled = getattr(features, "pooler_output", None)
    values = features if pooled is None else pooled
    if isinstance(values, Mapping):
        values = next(iter(values.values()))
    yield from [values] if isinstance(values, T) else values


def _rows(features: T) -> int:
    return features.shape[:-1].numel()
