"""What `plan="auto"` gives a model that has no plan: one that is derived from it, and proven, on each rank alike."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import nn

from parallelize.derivation.derive import derive_plan
from parallelize.models.model_source import ModelSource
from parallelize.plan.schema import Plan

log = logging.getLogger("parallelize")


def derived_plan(model: nn.Module) -> Plan:
    """The plan. Each rank derives it, from the same random numbers; the first rank logs what was proven.

    Raises: as `derive_plan`.
    """
    derived = derive_plan(source_of_instance(model))
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("plan %s, derived from %s: %s", derived.plan.name, type(model).__name__, derived.proof)
    return derived.plan


def source_of_instance(model: nn.Module) -> Any:
    """A model of `transformers` as its class and config, of which a small one is made; any other as it is."""
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return ModelSource(type(model).__name__, lambda config: type(model)(config), config)
    return model
