"""LoRA as a launch file describes it: PEFT's config, and the model that it wraps."""

from __future__ import annotations

from typing import Any

from torch import nn


def lora_config_class() -> Any:
    """PEFT's `LoraConfig`. Raises: ImportError without PEFT."""
    from peft import LoraConfig

    return LoraConfig


def with_adapters(model: nn.Module, config: Any) -> nn.Module:
    """PEFT's model around this one."""
    from peft import get_peft_model

    return get_peft_model(model, config)
