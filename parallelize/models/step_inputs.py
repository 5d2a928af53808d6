"""Inputs and targets of a training step of models that read more than the ids of one sequence, by their config and forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelize.models.image_inputs import image
from parallelize.models.wrapped_models import forward_signature


def step_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Keyword arguments of the forward with `targets`; empty for a model that reads ids alone, or in another way than these.

    Images have a class each; a text, or sound, has a target text of `sequence` tokens.
    """
    config: Any = getattr(model, "config", None)
    arguments = forward_signature(model).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values" and "input_ids" not in arguments and "ForImageClassification" in type(model).__name__:
        return {main: image(config, batch), "targets": torch.randint(0, int(config.num_labels), (batch,))}
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
