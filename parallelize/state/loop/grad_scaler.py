"""`torch.amp.GradScaler` on a mesh: all ranks skip a step, and change the scale, where one of them has an overflow.

PyTorch's scaler looks at the gradients of this rank, and of DTensors over the mesh of the first one. Ranks that
disagree would step some pipeline stages, or some shards, and not the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.mesh_view import MeshView
from parallelize.state.tensor_tables import TensorTable

_STAGED: TensorTable[MeshView] = TensorTable()  # parameters of pipeline stages
_MESHES: weakref.WeakKeyDictionary[Optimizer, MeshView] = weakref.WeakKeyDictionary()


def agree_on_overflow(optimizer: Optimizer, mesh: MeshView) -> None:
    """Let a `GradScaler` that unscales this optimizer's gradients look at those of all ranks of the mesh.

    Cost: building it sends nothing; the scaler's `unscale_` (or `step`) then ends with an all-reduce of one number.
    """
    if mesh.size > 1:
        _MESHES[optimizer] = mesh
        _install()


def agree_over_stages(parameter: Any, mesh: MeshView) -> None:
    """Let a `GradScaler` look at all ranks of the mesh where it unscales any optimizer that has this parameter of a
    stage.

    Cost: as `agree_on_overflow`. Every rank must unscale, as it must step.
    """
    _STAGED[parameter] = mesh
    _install()


def _install() -> None:
    private.wrap_in_torch("unscaling", _wrapped)


def _wrapped(stock: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    def unscale_grads(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        overflows = stock(scaler, optimizer, *args, **kwargs)
        mesh = _MESHES.get(optimizer) or _mesh_of_stages(optimizer)
        return overflows if mesh is None else _max_over_ranks(overflows, mesh)

    return unscale_grads


def _mesh_of_stages(optimizer: Optimizer) -> MeshView | None:
    """The mesh of a pipeline with a stage that an optimizer of the user's own steps."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((mesh for parameter in parameters if (mesh := _STAGED.get(parameter)) is not None), None)


def _max_over_ranks(overflows: dict[torch.device, torch.Tensor], mesh: MeshView) -> dict[torch.device, torch.Tensor]:
    """1 on the first device where any rank has an overflow on any of its devices; ranks without gradients take part."""
    group = mesh.world
    device = next(iter(overflows), None) or group.device
    local = [overflow.reshape(()).to(device) for overflow in overflows.values()]
    worst = torch.stack(local).max() if local else torch.zeros((), device=device)
    group.all_reduce(worst, dist.ReduceOp.MAX)
    return {**overflows, device: worst.reshape(overflows[device].shape if device in overflows else (1,))}
