"""Modules under the names that they had before: `parallelize.errors` is `parallelize.base.errors`, the same module
object.

One table for all of them, read by a finder that looks at names in this package alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from parallelize.base.package import NAME

MOVED = {
    "errors": "base.errors",
    "layout": "base.layout",
    "mesh": "base.mesh",
    "terminal": "base.terminal",
    "torch_private": "base.torch_private",
    "checkpoint.format.paths": "base.files.paths",
    "checkpoint.format.strict_json": "base.files.strict_json",
    "checkpoint.format.boxes": "base.boxes",
    "checkpoint.format.digests": "base.files.digests",
    "checkpoint.format.json_encoder": "checkpoint.format.json_codec",
    "checkpoint.format.json_decoder": "checkpoint.format.json_codec",
    "plan.yaml_nodes": "base.files.yaml_nodes",
    "styles": "plan.styles",
    "models": "plan.models",
    "dims": "plan.dims",
    "collectives": "ops.local_collectives",
    "ops.ulysses": "ops.all_to_all",
    "applied": "state",
    "loop": "state.loop",
    "optimizers": "state.optimizers",
    "quantization": "state.quantization",
    "randomness": "state.randomness",
    "state.early_optimizers": "state.guards.early_optimizers",
    "state.gradient_guard": "state.guards.unreduced_gradients",
    "state.gradient_inputs": "state.guards.partial_values",
    "state.offloaded_models": "state.guards.other_libraries",
    "state.other_wrappers": "state.guards.other_libraries",
    "state.partial_values": "state.guards.partial_values",
    "state.stock_methods": "state.guards.stock_methods",
    "state.user_initializers": "state.guards.stock_methods",
    "state.quantization.other_quantizers": "state.guards.other_libraries",
    "state.peft_reads": "adapters.full_weights",
    "axes.tensor.experts.adapted_experts": "adapters.adapted_experts",
    "axes.tensor.install.adapted_layers": "adapters.adapted_layers",
    "axes.tensor.install.added_adapters": "adapters.added_adapters",
    "axes.tensor.install.peft_prompts": "adapters.prompts",
    "axes.pipeline.stage_adapters": "adapters.stage_adapters",
    "plan.dims.classes": "plan.dims.factor_analysis",
    "apply": "training.apply_plan",
    "tensor": "axes.tensor",
    "zero": "axes.zero",
    "context": "axes.context",
    "pipeline": "axes.pipeline",
    "recomputation": "axes.recomputation",
    "vocabulary": "axes.vocabulary",
    "batch": "axes.batch",
    "data": "training.data",
    "trainers": "training.trainers",
    "analysis": "tools.analysis",
    "verification": "tools.verification",
    "derivation": "tools.derivation",
}
"""Name in the package before -> now, of files and of folders with all that is in them."""


def new_name(name: str) -> str | None:
    """The dotted name that a module has now. None: it has not moved, or is of another package."""
    package, _, inside = name.partition(".")
    if package != NAME:
        return None
    parts = inside.split(".")
    for length in range(len(parts), 0, -1):
        moved = MOVED.get(".".join(parts[:length]))
        if moved is not None:
            return ".".join([NAME, moved, *parts[length:]])
    return None


class MovedModules(MetaPathFinder):
    """Finds a module under its former name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        new = new_name(name)
        return None if new is None else ModuleSpec(name, _Loader(new))


class _Loader(Loader):
    def __init__(self, new: str):
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._new)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name; Python has given it the spec of the former one."""
        module.__spec__ = self._own_spec


def find_moved() -> None:
    """Let imports find modules under their former names, before Python looks for files: there are none of these
    names."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
