"""Spectrograms, and texts with the tokens that sound takes the place of, for models that read both."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parallelize.models.image_inputs import BATCH, text_around

T = torch.Tensor
_BINS = ("num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_per_channel")
_FRAMES = 64
_MOST_POSITIONS = 512
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
    return takes_sounds and callable(getattr(model, "get_audio_features", None)) and _sound_token(model) is not None


def sounds_in_text(model: nn.Module) -> dict[str, Any]:
    """One spectrogram in each text: the model itself says how many tokens it takes. Raises: what the model raises for the first form."""
    reason: Exception | None = None
    for sound in spectrograms(model.config):
        for mask in ({}, {"input_features_mask": torch.ones(BATCH, max(sound.shape[1:]), dtype=torch.long)}):
            sounds = {"input_features": sound, **mask}
            try:
                with torch.no_grad():
                    features = model.get_audio_features(**sounds)  # type: ignore[operator]
                return {"input_ids": text_around(model.config, features, _sound_token(model) or 0), **sounds}
            except Exception as error:  # of code of any model
                reason = reason or error
    assert reason is not None
    raise reason


def _sound_token(model: nn.Module) -> int | None:
    values = (getattr(model.config, name, None) for name in _TOKENS)
    return next((value for value in values if isinstance(value, int)), None)
