"""Inputs and targets of a training step of models that read more than the ids of one sequence, by their config and forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parallelize.plan.models.image_inputs import (
    accepts_images,
    has_images,
    image,
    images_in_text,
    plain_tokens,
)
from parallelize.plan.models.wrapped_models import forward_signature, stock_model

T = torch.Tensor


def step_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Keyword arguments of the forward with `targets`; empty for a model that reads ids alone, or in another way than these.

    Images have a class each; a text, or sound, has a target text of `sequence` tokens. Texts with images in them have the tokens of the
    images besides. Pairs of a text and an image have no targets: the model has a loss of its own.
    """
    config: Any = getattr(model, "config", None)
    arguments = forward_signature(model).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values" and "input_ids" not in arguments and "ForImageClassification" in type(model).__name__:
        return {main: image(config, batch), "targets": torch.randint(0, int(config.num_labels), (batch,))}
    if returns_loss(type(stock_model(model))) and hasattr(config, "text_config"):
        return _pairs(config, batch, sequence)
    if config is not None and not torch.empty(0).is_meta and has_images(model):
        return _texts_with_images(model, batch, sequence)
    if "decoder_input_ids" not in arguments or not getattr(config, "is_encoder_decoder", False):
        return {}
    vocabulary = int(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    source: torch.Tensor | None = None
    if main == "input_ids":
        source = torch.randint(0, int(config.vocab_size), (batch, sequence))
    elif main == "input_features" and type(getattr(config, "max_source_positions", None)) is int:
        source = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)  # a convolution halves them
    if source is None:
        return {}
    ids, targets = (torch.randint(0, vocabulary, (batch, sequence)) for _ in range(2))
    return {main: source, "decoder_input_ids": ids, "use_cache": False, "targets": targets}


def returns_loss(cls: type[nn.Module]) -> bool:
    """Whether a model computes a loss of pairs of a text and an image where `return_loss` asks for it."""
    if hasattr(cls, "_backends"):  # it stands for a class whose package is missing
        return False
    return {"input_ids", "pixel_values", "return_loss"} <= inspect.signature(cls.forward).parameters.keys()


def own_loss(output: Any, targets: Any) -> T:
    """The loss that a model of `returns_loss` has computed."""
    loss: T = output.loss
    return loss


def _pairs(config: Any, batch: int, sequence: int) -> dict[str, Any]:
    """Texts that end where their model reads them, and as many images."""
    text = config.text_config
    ids = torch.randint(3, max(4, int(text.vocab_size) - 1), (batch, sequence))  # 0 to 2 are padding and ends in most
    if type(end := getattr(text, "eos_token_id", None)) is int and end < text.vocab_size:
        ids = torch.where(ids == end, 3 if end != 3 else 4, ids)
        ids[:, -1] = end
    return {"input_ids": ids, "pixel_values": image(config, batch), "return_loss": True}


def _texts_with_images(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Texts with an image each; empty where the model takes none of the forms of images that are known.

    Not on meta: how many tokens an image takes is counted by running the model's tower, whose sizes are values there.
    """
    try:
        inputs = images_in_text(model, batch, sequence)
    except Exception:  # of code of any model, whose texts by themselves are read as those of others
        return {}
    config: Any = model.config
    text = getattr(config, "text_config", None) or config
    plain = plain_tokens(config, int(text.vocab_size) // 2)
    targets = plain[torch.randint(0, len(plain), inputs["input_ids"].shape)]
    return {**_by_rows(model, inputs, batch), "targets": targets}


def _by_rows(model: nn.Module, inputs: dict[str, Any], batch: int) -> dict[str, Any]:
    """The patches of all images as [batch, patches, channels] where the model takes them so: a part of the batch has its patches."""
    patches = inputs.get("pixel_values")
    if patches is None or patches.ndim != 2 or patches.shape[0] % batch:
        return inputs
    by_rows = {**inputs, "pixel_values": patches.unflatten(0, (batch, -1))}
    return by_rows if accepts_images(model, by_rows) else inputs
