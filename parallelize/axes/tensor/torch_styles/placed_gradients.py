"""Gradients of DTensor parameters that have the placements of their parameters.

Where PyTorch computes with DTensors, the gradient of a replicated parameter may be a sum that nobody has taken yet
(`Partial`), as of a norm on sequence shards or of the table of a row embedding. Reducers, clipping and optimizers read
local tensors, so each backward pass takes the sum before the gradient is added to `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement


def place_gradients(module: nn.Module) -> None:
    """Let the gradients of DTensor parameters in `module` be placed as these parameters, from the next backward on.

    Parameters that replace them later (a copy of the model, `to_empty`) are served from the forward on that they are
    read in.

    Cost: one all-reduce or reduce-scatter for each gradient that is `Partial`, in each backward pass.
    """
    for owner in module.modules():
        has_dtensors = any(isinstance(parameter, DTensor) for parameter in owner._parameters.values())
        if has_dtensors and _place_each not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(_place_each)
        _place_each(owner, None)


def _place_each(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return  # which reads the hooks of parameters, and cannot add any
    for parameter in module._parameters.values():
        if isinstance(parameter, DTensor) and parameter.requires_grad and not _is_placed(parameter):
            parameter.register_hook(partial(_placed, parameter.placements))


def _is_placed(parameter: DTensor) -> bool:
    hooks = (parameter._backward_hooks or {}).values()
    return any(isinstance(hook, partial) and hook.func is _placed for hook in hooks)


def _placed(placements: Sequence[Placement], gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with other placements than its parameter, with these."""
    if not isinstance(gradient, DTensor) or gradient.placements == tuple(placements):
        return gradient
    return gradient.redistribute(placements=placements)
