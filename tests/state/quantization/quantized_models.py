"""Tiny models with quantized linears, adapters of PEFT, and the unsharded models with the dequantized weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from parallelize import dequantize, quantize
from tests.axes.tensor.install.adapted_models import move
from tests.support.models import tiny_model

SIZES: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=64, head_dim=8, intermediate_size=128),
    "qwen2": dict(hidden_size=64, head_dim=8, intermediate_size=128),
    "phi3": dict(hidden_size=64, intermediate_size=128),
    "gpt2": dict(hidden_size=64, n_inner=128),
    "mixtral": dict(hidden_size=64, head_dim=8, intermediate_size=64),
}


def quantized(family: str, form: str = "nf4(block=16)", dtype: torch.dtype = torch.float64, **sizes: Any) -> nn.Module:
    """The stock model with quantized linears, without adapters; `sizes` over those of `SIZES`."""
    return quantize(tiny_model(family, dtype, **{**SIZES[family], **sizes}), form)


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """LoRA of PEFT whose values have an effect."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 5, "target_modules": "all-linear", **options})
    return move(peft.get_peft_model(model, config))


def reference_of(model: nn.Module) -> nn.Module:
    """The same model with the dequantized weights."""
    return dequantize(copy.deepcopy(model))


def trained(named: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Of values by parameter name, those of parameters that train."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in named.items() if name in names}
