"""Inputs with which a model's forward is recorded and proven, where the caller gives none."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.plan.models.image_inputs import (
    BATCH,
    LENGTH,
    features_function,
    has_images,
    image,
    images_in_text,
    masking,
    text_around,
)
from parallelize.plan.models.model_source import ModelSource

T = torch.Tensor


def inputs_of(source: ModelSource, model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of the model's forward, without targets.

    Raises: ModelError `unknown-inputs`.
    """
    if "inputs" in source.extras:
        inputs = dict(source.extras["inputs"](BATCH, LENGTH))
    else:
        inputs = _inputs_by_config(model) or _inputs_of_ids(source, model)
    inputs.pop("targets", None)
    return inputs


def _inputs_of_ids(source: ModelSource, model: nn.Module) -> dict[str, Any]:
    try:
        return source.inputs(model, BATCH, LENGTH)
    except ParallelizeError as error:
        what = f"it is not known how the forward of {type(model).__name__} is called"
        fix = "--inputs module:function, which returns keyword arguments; or example_inputs= of derive_plan"
        raise ModelError(Problem("unknown-inputs", what, fix=fix)) from error


def _inputs_by_config(model: nn.Module) -> dict[str, Any]:
    """For models of `transformers` that take other inputs than ids, by the name of their main input."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    if config is None:
        return {}
    parameters = inspect.signature(model.forward).parameters
    if has_images(model):
        return images_in_text(model)
    if name == "pixel_values" and "input_ids" not in parameters:
        return {"pixel_values": image(config), **masking(model)}
    if "pixel_values" in parameters and hasattr(config, "projection_dim"):  # a text and a vision tower
        return {"input_ids": _ids(config.text_config, LENGTH), "pixel_values": image(config)}
    if name == "pixel_values":
        return {"pixel_values": image(config)}
    if name in ("input_features", "input_values"):
        bins = getattr(config, "num_mel_bins", 80)
        frames = 2 * int(getattr(config, "max_source_positions", 32))
        x = torch.randn(BATCH, bins, frames) if name == "input_features" else torch.randn(BATCH, 800)
        return {name: x, **_decoder_ids(config)}
    if getattr(config, "is_encoder_decoder", False):
        return {name: _ids(config, LENGTH), **_decoder_ids(config)}
    if name == "input_ids" and "pixel_values" in parameters and hasattr(config, "vision_config"):
        return {name: _ids(config, LENGTH), "pixel_values": image(config)}
    return {}


def _decoder_ids(config: Any) -> dict[str, Any]:
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    return {"decoder_input_ids": _ids(config, LENGTH - 2), "use_cache": False}


def _ids(config: Any, length: int) -> T:
    return torch.randint(3, int(config.vocab_size), (BATCH, length))  # 0 to 2 are padding, beginning and end in most


# -- audio inputs ----------------------------------------------------------------------------------------------------
# Spectrograms, and texts with the tokens that sound takes the place of, for models that read both.


_BINS = ("num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_per_channel")
_FRAMES = 64
_MOST_POSITIONS = 512
_FUNCTION = "get_audio_features"
_MASKS = ("input_features_mask", "feature_attention_mask")
_TOKENS = ("audio_token_id", "audio_token_index")


def spectrograms(config: Any) -> list[T]:
    """[batch, bins, frames], and [batch, frames, bins]."""
    positions = getattr(config, "max_source_positions", None) or getattr(config, "max_length", None)
    frames = 2 * positions if type(positions) is int and positions <= _MOST_POSITIONS else _FRAMES
    bins = bins_of(config)
    return [torch.randn(BATCH, bins, frames), torch.randn(BATCH, frames, bins)]


def bins_of(config: Any) -> int:
    """The frequencies of a spectrogram, by the config or one of its parts."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {})
    for part in (config, *parts):
        for name in _BINS:
            if type(size := getattr(part, name, None)) is int:
                return size
    return 80


def has_sounds(model: nn.Module) -> bool:
    """Whether a model of `transformers` puts features of spectrograms in the place of tokens of a text."""
    takes_sounds = "input_features" in inspect.signature(model.forward).parameters
    return takes_sounds and features_function(model, _FUNCTION) is not None and _sound_token(model) is not None


def sounds_in_text(model: nn.Module) -> dict[str, Any]:
    """One spectrogram in each text: the model itself says how many tokens it takes. Raises: what the model raises for
    the first form."""
    sounds, features = _accepted(model)
    return {"input_ids": text_around(model.config, features, _sound_token(model) or 0), **sounds}


def images_and_sounds_in_text(model: nn.Module) -> dict[str, Any]:
    """One image in each text, and one spectrogram after it. Raises: as the two by themselves."""
    images, sounds = images_in_text(model), sounds_in_text(model)
    ids = torch.cat([images.pop("input_ids"), sounds.pop("input_ids")], 1)
    if "mm_token_type_ids" in images:
        kinds = images["mm_token_type_ids"]
        images["mm_token_type_ids"] = nn.functional.pad(kinds, (0, ids.shape[1] - kinds.shape[1]))
    return {"input_ids": ids, **images, **sounds}


@torch.no_grad()
def _accepted(model: nn.Module) -> tuple[dict[str, Any], Any]:
    """The first form of spectrograms, without a mask or with one, that the model takes, and their features."""
    features_of: Any = features_function(model, _FUNCTION)
    masks = [name for name in _MASKS if name in inspect.signature(features_of).parameters]
    reason: Exception | None = None
    for sound, name in product(spectrograms(model.config), ("", *masks)):
        for frames in sorted({*sound.shape[1:]}, reverse=True) if name else (0,):
            mask = {name: torch.ones(BATCH, frames, dtype=torch.long)} if name else {}
            sounds = {"input_features": sound, **mask}
            try:
                return sounds, features_of(**sounds)
            except Exception as error:  # of code of any model
                reason = reason or error
    assert reason is not None
    raise reason


def _sound_token(model: nn.Module) -> int | None:
    values = (getattr(model.config, name, None) for name in _TOKENS)
    return next((value for value in values if isinstance(value, int)), None)
