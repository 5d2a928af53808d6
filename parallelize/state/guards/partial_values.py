"""Refuses to read one rank's part as the whole: a number, such as `grad.norm().item()`, or gradients by
`backward(inputs=...)`.

A reduction of a sharded DTensor gives each rank its part, and `.item()`, `float()` and `bool()` return that part: a
decision taken on it differs by rank. The other ranks may not call it, so that reducing it there could wait for ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.guards.rank_means import refuse_rank_mean
from parallelize.state.records import mark_of

_NAMES = "axes of planned models"


def guard_partial_values(*meshes: DeviceMesh) -> None:
    """Let `.item()` of a DTensor raise ModelError `partial-value` where ranks have parts of it.

    meshes: of planned models. DTensors of meshes that share no axis with them are not theirs, and are read as PyTorch
    reads them.
    """
    names = patches.lease().notes.setdefault(_NAMES, set())
    names.update(name for mesh in meshes for name in _names_of(mesh))
    op = torch.ops.aten._local_scalar_dense.default
    patches.handle("DTensor's handler of _local_scalar_dense", private.dtensor_handlers, op, _item)


def _item(op: Any, args: tuple, kwargs: dict) -> Any:
    value: DTensor = args[0]
    mesh = value.device_mesh
    parts = [dim for dim, placement in enumerate(value.placements) if placement.is_partial() and mesh.size(dim) > 1]
    if parts and _is_planned(mesh) and not _is_asserted():
        axes = ", ".join(_axis(mesh, dim) for dim in parts)
        what = f"a number is read of which each rank of {axes} has its part, {private.local_of(value).item()} here"
        fix = (
            "value.full_tensor().item(), a collective, on every rank; of gradients: clip_grad_norm_ and full_gradients"
        )
        raise ModelError(Problem("partial-value", what, fix=fix))
    return op(private.local_of(value))


def _names_of(mesh: DeviceMesh) -> tuple[str | None, ...]:
    return private.root_of(mesh).mesh_dim_names or (None,)


def _is_planned(mesh: DeviceMesh) -> bool:
    return not patches.lease().notes.get(_NAMES, set()).isdisjoint(_names_of(mesh))


def _is_asserted() -> bool:
    """Whether `torch.testing` compares two tensors: each rank compares its part, and fails by itself."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.testing._comparison":
        frame = frame.f_back
    return frame is not None


def _axis(mesh: Any, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"mesh dim {dim}"


# -- gradient inputs -------------------------------------------------------------------------------------------------
# Refuses gradients with respect to planned parameters, which PyTorch would leave out. A planned module computes with
# plain leaves, whose gradients a hook moves to the DTensors. `backward(inputs=...)` runs no such hook, and
# `torch.autograd.grad(..., allow_unused=True)` returns None: neither says so.


def refuse_gradient_inputs() -> None:
    """Calls without `inputs` and calls on other tensors run as they are."""
    watch_backwards()
    private.wrap_in_torch("grad", _grad)


def watch_backwards() -> None:
    """Look at what a backward is given, before it runs: at its inputs, and at the losses that it begins with."""
    private.wrap_in_torch("backward", _backward)


def _backward(stock: Callable[..., None]) -> Callable[..., None]:
    def backward(*args: Any, **kwargs: Any) -> None:
        refuse_rank_mean(kwargs.get("tensors", args[0] if args else ()))
        inputs = kwargs.get("inputs", args[5] if len(args) > 5 else None)
        if inputs is None:
            return stock(*args, **kwargs)
        planned = [(x, _gradient_of(x)) for x in _tensors(inputs) if mark_of(x).own]
        stock(*args, **kwargs)
        if any(_gradient_of(x) == before for x, before in planned):
            raise _refusal("backward(inputs=...)")
        return None

    return backward


def _grad(stock: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        gradients = stock(outputs, inputs, *args, **kwargs)
        if any(gradient is None and mark_of(x).own for x, gradient in zip(_tensors(inputs), gradients, strict=False)):
            raise _refusal("torch.autograd.grad")
        return gradients

    return grad


def _tensors(inputs: Any) -> list[Any]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return list(inputs) if isinstance(inputs, Iterable) else [inputs]


def _gradient_of(parameter: Any) -> tuple[int, int]:
    """Which gradient a parameter has, and how often it was written to."""
    gradient = getattr(parameter, "grad", None)
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _refusal(call: str) -> ModelError:
    what = f"{call} does not reach the parameters of planned modules, which compute with local tensors"
    return ModelError(Problem("gradient-inputs", what, fix="loss.backward(), and read the parameters' .grad"))
