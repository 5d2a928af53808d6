"""Models whose parameters accelerate loads for each forward (`device_map` with CPU or disk) are refused.

Its hooks put full tensors in the place of parameters, by the shapes that these had when the model was dispatched. Hooks that only
move inputs to a device change nothing, and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem, short_list


def refuse_offloaded(module: nn.Module) -> None:
    """Raises: ModelError `offloaded-parameters` for a model with parameters on CPU or disk that hooks load for each forward."""
    names = [
        name or "the model"
        for name, inner in module.named_modules()
        if any(getattr(hook, "offload", None) is True for hook in _hooks(getattr(inner, "_hf_hook", None)))
    ]
    if names:
        what = f"accelerate loads the parameters of {short_list(names, 3)} for each forward, in full"
        fix = "load the model without device_map, or call accelerate.hooks.remove_hook_from_submodules(model) first; "
        fix += "a plan shards a model on the CPU or on meta, so that no rank's device stores all of it"
        raise ModelError(Problem("offloaded-parameters", what, fix=fix))


def _hooks(hook: Any) -> Iterator[Any]:
    """A hook, or those that a sequence of hooks contains."""
    yield hook
    for inner in getattr(hook, "hooks", ()):
        yield from _hooks(inner)
