"""Modules in no ZeRO 3 unit that are called outside of a forward of their model: an embedding or a head by hand, a base
model.

`fully_shard` gathers what is in no unit for the forwards of the model alone. Here such a call of a part does what the
model's forward does around its own: it gathers, and its gradients are reduced at the end of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from parallelize.state.forward_steps import UNIT, add_step, run_inner

_METHOD = "_call_of_part"


def gather_for_parts(model: nn.Module, owners: list[nn.Module], axis: str, check: Callable[[Any, Any], None]) -> None:
    """Let modules with parameters in no unit be called outside of a forward of the model.

    Args:
        model: the root, after `fully_shard`. owners: the modules, of which the root is none.
        axis: of the mesh, over which parameters are sharded.
        check: (model, inputs) before each such call; raises what a hook before the model's forward would.
    """
    if not owners:
        return
    model.__dict__[_METHOD] = MethodType(_run_part, model)
    register_fsdp_forward_method(model, _METHOD)
    root = weakref.ref(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameter: Any = next(iter(self._parameters.values()))
        if not isinstance(parameter, DTensor) or axis not in (parameter.device_mesh.mesh_dim_names or ()):
            return run_inner(self, UNIT, args, kwargs)
        whole: Any = root()
        check(whole, ())
        out = getattr(whole, _METHOD)(self, args, kwargs)
        if not torch.is_grad_enabled():  # nothing else frees what was gathered before an optimizer changes the shards
            whole.reshard()
        return out

    for owner in owners:
        add_step(owner, UNIT, forward)


def _run_part(model: nn.Module, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_inner(part, UNIT, args, kwargs)
