"""Inputs with which a model's forward is recorded and proven, where the caller gives none."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.plan.models.image_inputs import BATCH, LENGTH, has_images, image, images_in_text, masking
from parallelize.plan.models.model_source import ModelSource

T = torch.Tensor


def inputs_of(source: ModelSource, model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of the model's forward, without targets.

    Raises: ModelError `unknown-inputs`.
    """
    if "inputs" in source.extras:
        inputs = dict(source.extras["inputs"](BATCH, LENGTH))
    else:
        inputs = _by_config(model) or _by_ids(source, model)
    inputs.pop("targets", None)
    return inputs


def _by_ids(source: ModelSource, model: nn.Module) -> dict[str, Any]:
    try:
        return source.inputs(model, BATCH, LENGTH)
    except ParallelizeError as error:
        what = f"it is not known how the forward of {type(model).__name__} is called"
        fix = "--inputs module:function, which returns keyword arguments; or example_inputs= of derive_plan"
        raise ModelError(Problem("unknown-inputs", what, fix=fix)) from error


def _by_config(model: nn.Module) -> dict[str, Any]:
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
