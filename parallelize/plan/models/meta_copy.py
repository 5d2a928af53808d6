"""A copy of a model without values, which shares nothing with it that a forward could change."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from parallelize.plan.models.copied_functions import rebind_functions

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def meta_copy(model: nn.Module) -> nn.Module:
    """The same module on the meta device, with the same ties."""
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    copied = copy.deepcopy(model, copies)
    rebind_functions(copied, copies)
    return copied


def without_hooks(model: nn.Module) -> nn.Module:
    """The same module, whose forward calls none of the user's hooks."""
    for module in model.modules():
        for name in _HOOKS:
            getattr(module, name).clear()
    return model
