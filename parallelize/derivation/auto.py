"""What `plan="auto"` gives a model that has no plan: one that is derived from it, and proven, on each rank alike."""

from __future__ import annotations

from typing import Any

from torch import nn

from parallelize.derivation.derive import derive_plan
from parallelize.models.model_source import ModelSource
from parallelize.plan.schema import Plan


def derived_plan(model: nn.Module) -> tuple[Plan, str]:
    """(the plan, how it was made). The random numbers of the caller are left alone, and all ranks get the same plan.

    Raises: as `derive_plan`.
    """
    derived = derive_plan(source_of_instance(model))
    return derived.plan, f"deriving it: {derived.proof}"


def source_of_instance(model: nn.Module) -> Any:
    """A model of `transformers` as its class and config, of which a small one is made; any other as it is."""
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return ModelSource(type(model).__name__, lambda config: type(model)(config), config)
    return model
