"""Inputs by the names of a forward's arguments, with a few shapes to try of those that models read in several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch
from torch import nn

from parallelize.plan.models.example_inputs import bins_of, spectrograms
from parallelize.plan.models.image_inputs import BATCH, LENGTH, image, patches_with_places, rows_of_patches
from parallelize.plan.models.wrapped_models import forward_signature, stock_model

T = torch.Tensor
_MOST = 8
"""Of combinations of shapes that are tried."""

_ROWS = 4  # patches along each side of an image
_WAVE = 1600  # samples of sound


def inputs_by_signature(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments of a forward of `transformers`: each combination of shapes, first with images and sound, then
    with ids alone."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    parameters = inspect.signature(model.forward).parameters
    if "grid_thw" in parameters:
        yield rows_of_patches(model)
    if "spatial_shapes" in parameters:
        yield _images_in_rows(config, parameters)
    main = getattr(model, "main_input_name", "input_ids")
    always = [name for name in parameters if name in (main, "input_ids", "decoder_input_ids", "bbox")]
    required = [name for name, value in parameters.items() if value.default is value.empty and name in MAKERS]
    more = [name for name in parameters if name in ("pixel_values", "input_features", "input_values")]
    for names in ([*always, *required, *more], [*always, *required]):
        names = [name for name in dict.fromkeys(names) if name in MAKERS]
        yield from islice(_combinations(names, config, parameters), _MOST)


def _images_in_rows(config: Any, parameters: Any) -> dict[str, Any]:
    """Images as [batch, patches, channels x height x width], with the number of patches along each side."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "num_channels", 3) * vision.patch_size**2
    masks = {
        name: torch.ones(BATCH, _ROWS**2, dtype=torch.long) for name in ("pixel_attention_mask",) if name in parameters
    }
    ids = {"input_ids": _ids(LENGTH)(config)[0]} if "input_ids" in parameters else {}
    shapes = torch.tensor([[_ROWS, _ROWS]] * BATCH)
    return {**ids, "pixel_values": torch.randn(BATCH, _ROWS**2, size), "spatial_shapes": shapes, **masks}


def _combinations(names: list[str], config: Any, parameters: Any) -> Iterator[dict[str, Any]]:
    fixed = {"use_cache": False} if hasattr(config, "use_cache") and "use_cache" in parameters else {}
    for values in product(*(MAKERS[name](config) for name in names)):
        inputs = {**dict(zip(names, values, strict=True)), **fixed}
        if inputs.keys() - fixed.keys():
            yield inputs


def vocabulary_of(config: Any) -> int:
    """The smallest vocabulary in a config and its text part."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = [getattr(part, "vocab_size", None) for part in (config, text, getattr(config, "text_config", None))]
    return min((size for size in sizes if type(size) is int and size > 4), default=32)


def _ids(length: int) -> Callable[[Any], list[T]]:
    return lambda config: [torch.randint(3, max(4, vocabulary_of(config) * 3 // 4), (BATCH, length))]


def _images(config: Any) -> list[T]:
    """[batch, channels, height, width], also of several images or frames."""
    pixels = image(config)
    frames = getattr(config, "num_frames", None)
    videos = [pixels.unsqueeze(1).repeat(1, int(frames), 1, 1, 1)] if type(frames) is int else []
    return [*videos, pixels, pixels.unsqueeze(1)]


def _waves(config: Any) -> list[T]:
    """[batch, samples], [batch, 1, samples], and a spectrogram [batch, frames, bins]."""
    frames = getattr(config, "max_length", None)
    wave = torch.randn(BATCH, _WAVE)
    return [wave, wave.unsqueeze(1), torch.randn(BATCH, frames if type(frames) is int else 64, bins_of(config))]


def _boxes(config: Any) -> list[T]:
    corners = torch.randint(0, 50, (BATCH, LENGTH, 2))
    boxes = torch.cat([corners, corners + 10], -1)
    return [boxes, boxes / 100.0]


def _patches(config: Any) -> list[T]:
    patches = patches_with_places(config)
    return [] if patches is None else [patches]


def _queries(config: Any) -> list[T]:
    width = getattr(config, "hidden_size", None)
    return [torch.randn(BATCH, LENGTH, width)] if type(width) is int else []


def _seen(config: Any) -> list[T]:
    """Masks of spectrograms, [batch, frames]."""
    return [torch.ones(BATCH, spectrogram.shape[-1], dtype=torch.long) for spectrogram in spectrograms(config)]


MAKERS: dict[str, Callable[[Any], list[T]]] = {
    "input_ids": _ids(LENGTH),
    "decoder_input_ids": _ids(LENGTH - 2),
    "qformer_input_ids": _ids(LENGTH - 4),
    "flattened_patches": _patches,
    "pixel_values": _images,
    "input_features": spectrograms,
    "input_values": _waves,
    "input_features_mask": _seen,
    "audio_values": _waves,
    "bbox": _boxes,
    "query_embeds": _queries,
    "inputs_embeds": _queries,
    "hidden_states": _queries,
}


# -- cache arguments -------------------------------------------------------------------------------------------------
# Whether a model of `transformers` makes a key/value cache unless its caller says otherwise.


def cache_off(module: nn.Module) -> dict[str, bool]:
    """The argument with which a model of `transformers` makes no key/value cache; empty for models that take none.

    A model whose own signature does not name it may pass it on to its decoder.
    """
    config: Any = getattr(stock_model(module), "config", None)
    if not hasattr(config, "_attn_implementation"):
        return {}
    parameters = forward_signature(module).parameters
    passes_on = "past_key_values" in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = "use_cache" in parameters or (passes_on and _makes_caches(config))
    return {"use_cache": False} if takes else {}


def _makes_caches(config: Any) -> bool:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return any(hasattr(part, "use_cache") for part in (config, text))
