"""Tiny models with adapters of PEFT whose values are no longer those at which an adapter has no effect."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.models import tiny_model

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def config(kind: str) -> Any:
    import peft

    every = {"r": 4, "lora_alpha": 5, "target_modules": "all-linear"}
    experts = {"r": 2, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
    some = {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"], "layers_to_transform": [1]}
    ends = {"r": 3, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    kinds = {
        "lora": lambda: peft.LoraConfig(**every),
        "bias": lambda: peft.LoraConfig(**every, bias="lora_only", lora_bias=True),
        "dora": lambda: peft.LoraConfig(**every, use_dora=True),
        "some layers": lambda: peft.LoraConfig(r=3, use_rslora=True, **some),
        "embedding": lambda: peft.LoraConfig(r=3, target_modules=some["target_modules"]),
        "copies": lambda: peft.LoraConfig(**ends),
        "ia3": lambda: peft.IA3Config(target_modules=LINEARS, feedforward_modules=["down_proj", "up_proj"]),
        "every bias": lambda: peft.LoraConfig(r=4, target_modules=LINEARS, bias="all"),
        "norms": lambda: peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["norm", "input_layernorm"]),
        "blocks": lambda: peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["mlp"]),
        "experts": lambda: peft.LoraConfig(**experts),
        "routers": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]),
        "tokens": lambda: peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 5, 40]),
        "dropout": lambda: peft.LoraConfig(**{**every, "target_modules": LINEARS}, lora_dropout=0.2),
    }
    return kinds[kind]()


def move(model: nn.Module) -> nn.Module:
    """Change every parameter that trains, by the same values on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "modules_to_save" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1)
    return model.train()


def adapted_model(family: str, kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    import peft

    torch.manual_seed(0)
    return move(peft.get_peft_model(tiny_model(family, dtype), config(kind)))
