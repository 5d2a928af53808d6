"""What a manifest says about the run that wrote it, for people and for tools that have no model."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
from torch import nn

from parallelize import __version__
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import ParallelizeError
from parallelize.base.mesh import MeshSpec
from parallelize.checkpoint.run.load import mesh_of
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import resolve
from parallelize.state.local_config import class_of, full_config
from parallelize.state.records import record_of, resolution_of


def run_metadata(on_mesh: ModelOnMesh) -> dict[str, Any]:
    """Mesh, plan, model, versions and time, as plain values."""
    record, data = record_of(on_mesh.module), data_of(on_mesh.module)
    plan = record.resolved.plan if record is not None else None
    return {
        "mesh": mesh_of(on_mesh),
        "world_size": on_mesh.mesh.size if on_mesh.mesh is not None else 1,
        "zero": data.zero if data is not None else None,
        "plan": {"name": plan.name, "digest": plan.digest()} if plan is not None else None,
        "model": model_metadata(on_mesh.module),
        "units": units_of(on_mesh.module),
        "versions": {
            "parallelize": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def model_metadata(module: nn.Module) -> dict[str, Any]:
    """The class of a model, and the config of a `transformers` model."""
    config: Any = full_config(getattr(module, "config", None))
    as_dict = getattr(config, "to_json_string", None)
    generation: Any = getattr(module, "generation_config", None)
    cls = class_of(module)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": as_dict(use_diff=False) if callable(as_dict) else None,
        "generation_config": generation.to_json_string() if hasattr(generation, "to_json_string") else None,
    }


def units_of(module: nn.Module) -> list[str]:
    """The modules between which a pipeline may cut, in calling order; empty where no plan says."""
    resolved = resolution_of(module)
    if resolved is None:
        try:
            resolved = resolve(plan_or_none(module, None), describe(module), MeshSpec())
        except ParallelizeError:
            return []
    return list(resolved.stages.units) if resolved.stages is not None else []
