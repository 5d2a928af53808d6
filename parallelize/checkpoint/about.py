"""What a manifest tells of the run that wrote it, for people and for tools that have no model."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
from torch import nn

import parallelize
from parallelize.checkpoint.held import Place
from parallelize.checkpoint.load import mesh_of
from parallelize.checkpoint.stock_class import class_of
from parallelize.errors import ParallelizeError
from parallelize.local_config import whole_config
from parallelize.pipeline.cut import cut_of
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model import describe
from parallelize.plan.stages import cut_stages
from parallelize.sharding import record_of
from parallelize.zero.apply import data_of


def about_run(place: Place) -> dict[str, Any]:
    """Mesh, plan, model, versions and time; plain values."""
    record, data = record_of(place.module), data_of(place.module)
    plan = record.resolved.plan if record is not None else None
    return {
        "mesh": mesh_of(place),
        "world_size": place.mesh.size() if place.mesh is not None else 1,
        "zero": data.zero if data is not None else None,
        "plan": {"name": plan.name, "digest": plan.digest()} if plan is not None else None,
        "model": about_model(place.module),
        "units": units_of(place.module),
        "versions": {
            "parallelize": parallelize.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def about_model(module: nn.Module) -> dict[str, Any]:
    """Its class, and the config of a `transformers` model."""
    config: Any = whole_config(getattr(module, "config", None))
    as_dict = getattr(config, "to_json_string", None)
    generation: Any = getattr(module, "generation_config", None)
    cls = class_of(module)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": as_dict(use_diff=False) if callable(as_dict) else None,
        "generation_config": generation.to_json_string() if hasattr(generation, "to_json_string") else None,
    }


def units_of(module: nn.Module) -> list[str]:
    """The modules between which a pipeline may cut, in calling order; empty where nobody knows."""
    cut = cut_of(module)
    if cut is not None:
        return list(cut.stages.units)
    try:
        return list(cut_stages(plan_or_none(module, None), describe(module), 1).units)
    except ParallelizeError:
        return []
