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


_MOST_RANKS = 8  # of a proof, whose ranks are threads


def derived_plan(model: nn.Module, tp: int) -> Plan:
    """The plan. Each rank derives it, from the same random numbers; the first rank logs what was proven.

    tp: the ranks that it is for. A model of one's own, which is not scaled, is proven on as many: what they do not divide is left whole.

    Raises: as `derive_plan`.
    """
    source = source_of_instance(model)
    ranks = 2 if isinstance(source, ModelSource) else min(max(tp, 2), _MOST_RANKS)
    derived = derive_plan(source, tp=ranks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("plan %s, derived from %s: %s", derived.plan.name, type(model).__name__, derived.proof)
    return derived.plan


def source_of_instance(model: nn.Module) -> Any:
    """A model of `transformers` as its class and config, of which a small one is made; any other as it is."""
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return ModelSource(type(model).__name__, lambda config: type(model)(config), config)
    return model
