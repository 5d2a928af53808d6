"""The model of a run: as its class builds it, with weights in 4 or 8 bits and adapters where the file asks for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.adapters.lora import lora_config_class, with_adapters
from parallelize.base.errors import LaunchError, Problem
from parallelize.checkpoint.hub.pretrained import load_pretrained
from parallelize.launch.config.run_config import ModelSection, RunConfig
from parallelize.plan.block_formats import block_format
from parallelize.plan.models.model_source import ModelSource, read_model
from parallelize.state.quantization.quantize import quantize


def source_of_run(section: ModelSection) -> ModelSource:
    """The source of the model as it trains, for what is computed without weights.

    Raises: as `read_model`, `block_format` and `adapters_of`.
    """
    source = read_model(section.name, section.set)
    if not section.quantize and not section.lora:
        return source
    form = block_format(section.quantize) if section.quantize else None
    adapters = adapters_of(section)

    def make(config: Any) -> nn.Module:
        model = source.make(config)
        model = quantize(model, form) if form is not None else model
        return model if adapters is None else with_adapters(model, adapters)

    return replace(source, make=make)


def adapters_of(section: ModelSection) -> Any:
    """The config of the adapters that a file describes, or None. Raises: LaunchError `no-peft`, `bad-adapters`."""
    if not section.lora:
        return None
    try:
        config_class = lora_config_class()
    except ImportError:
        what = "model.lora asks for adapters of PEFT, which is not installed"
        raise LaunchError(Problem("no-peft", what, fix="pip install peft")) from None
    try:
        return config_class(**section.lora)
    except (TypeError, ValueError) as error:
        what = f"PEFT's LoraConfig refuses model.lora: {str(error).splitlines()[0][:200]}"
        raise LaunchError(
            Problem("bad-adapters", what, fix="model: {lora: {r: 16, target_modules: all-linear}}")
        ) from error


def prepared_base(module: nn.Module, config: RunConfig, mesh: DeviceMesh, device: str) -> tuple[nn.Module, Any]:
    """(the model before its plan, where its values come from: as `parallelize_model` takes `initialize`). A collective.

    Args:
        module: on meta. With adapters its weights are read here, because they are made beside weights that have values.
    """
    section = config.model
    if section.quantize:
        module = quantize(module, section.quantize)
    adapters = adapters_of(section)
    if adapters is None:
        return module, section.initialize
    load_pretrained(module, str(section.initialize), mesh=mesh, device=device)
    torch.manual_seed(config.seed)  # adapters are the same on every rank
    return with_adapters(module, adapters).train(), None
