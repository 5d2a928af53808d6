"""The collective matmuls on DTensors, where they mean `F.linear` and the collective is part of the op's rule.

The layout is that of the arguments. The weight is sharded along one mesh axis, over which the op communicates:

    op                      x on that axis   weight     output      weight gradient
    all_gather_linear       Shard(dim)       Shard(0)   Shard(-1)   Shard(0)
    linear_reduce_scatter   Shard(-1)        Shard(1)   Shard(dim)  Shard(1)
    linear_all_reduce       Shard(-1)        Shard(1)   Replicate   Shard(1)
    column_linear           Replicate        Shard(0)   Shard(-1)   Shard(0)

On other axes `x` may be sharded along any row dim (weight gradients are then Partial there, as those of any DTensor
op). The group is text in an op's arguments. Here it is a mesh axis, written "axis:n", of the tensors' mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops.library import LIBRARY, NAMESPACE

T = torch.Tensor
Ds = Sequence[DTensor]
Maybe = Sequence[DTensor | None]
_ops = torch.ops.parallelize
_AXIS = "axis:"


class WeightAxis:
    """The mesh axis along which the weights of a call on DTensors are sharded: there the call communicates.

    Args:
        op: the name of the op, for messages.
        weight_dim: the dim along which the weights must be sharded.
        dim: the dim of the rows; None for an op whose `x` is replicated or sharded along features.

    Attributes:
        shape: the shape of `x` on the rank with the largest shard. width: output features on that rank.

    Raises: ShapeError `wrong-placement`.
    """

    def __init__(self, op: str, x: Any, weights: list[Any], weight_dim: int, dim: int | None):
        self.op = op
        for value in (x, *weights):
            if not isinstance(value, DTensor):
                self._refuse(
                    "x and weights must all be DTensors, or none of them", "DTensor.from_local or distribute_tensor"
                )
        self.mesh = x.device_mesh
        axes = [n for n, placement in enumerate(weights[0].placements) if placement.is_shard()]
        if len(axes) != 1 or any(weight.device_mesh != self.mesh for weight in weights):
            self._refuse(
                "weights must be sharded along exactly one axis of x's mesh", "see parallelize.ops.matmul.dtensor_rules"
            )
        self.axis = axes[0]
        self._check_placements(x, weights, weight_dim, dim)

        shape = list(x.shape)
        for n, placement in enumerate(x.placements):  # along the axis itself, rows are full and features are a shard
            if placement.is_shard() and (n != self.axis or placement.dim % x.ndim == x.ndim - 1):
                shape[placement.dim] = -(-shape[placement.dim] // self.mesh.size(n))
        self.shape, self.size = tuple(shape), self.mesh.size(self.axis)
        widths = sum(weight.shape[0] for weight in weights)
        self.width = widths if weight_dim else -(-widths // self.mesh.size(self.axis))

    def _check_placements(self, x: Any, weights: list[Any], weight_dim: int, dim: int | None) -> None:
        for weight in weights:
            if weight.placements[self.axis] != Shard(weight_dim):
                self._refuse(f"a weight is {weight.placements}", f"Shard({weight_dim}) on axis {self.axis}")
        expected = Shard(x.ndim - 1) if weight_dim else Replicate() if dim is None else Shard(dim % x.ndim)
        if _positive(x.placements[self.axis], x.ndim) != expected:
            self._refuse(f"x is {x.placements}", f"x.redistribute to {expected!r} on axis {self.axis}")
        for n, placement in enumerate(x.placements):
            rows = placement.is_replicate() or (placement.is_shard() and placement.dim % x.ndim < x.ndim - 1)
            same = dim is not None and placement.is_shard() and placement.dim % x.ndim == dim % x.ndim
            if n != self.axis and (not rows or same):
                self._refuse(f"x is {x.placements}", f"Replicate, or Shard of another row dim, on axis {n}")

    @property
    def key(self) -> str:
        return f"{_AXIS}{self.axis}"

    def group(self) -> Group:
        return Group(self.mesh.get_group(self.axis))

    def _refuse(self, what: str, fix: str) -> None:
        raise ShapeError(Problem("wrong-placement", f"{self.op}: {what}", fix=fix))


def _positive(placement: Placement, ndim: int) -> Placement:
    return Shard(cast(Shard, placement).dim % ndim) if placement.is_shard() else placement


def _replace_placement(placements: tuple[Any, ...], axis: int, placement: Placement) -> list[Placement]:
    return [placement if n == axis else old for n, old in enumerate(placements)]


def _wrapped(local: T, mesh: Any, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


class ReplicatedBias(torch.autograd.Function):
    """A bias that is replicated along the axis of an op: backward sums its gradient over the axis at once."""

    @staticmethod
    def forward(ctx: Any, bias: T, key: str) -> T:
        ctx.axis = _axis(key)
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        return grad.redistribute(placements=_replace_placement(grad.placements, ctx.axis, Replicate())), None


# -- rules: (DTensor, op, types, args, kwargs) -> DTensors -------------------------------------------------------------


def _axis(key: str) -> int:
    return int(key.removeprefix(_AXIS))


def _locals(values: Sequence[Any]) -> list[T]:
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def _group(mesh: Any, key: str) -> str:
    return Group(mesh.get_group(_axis(key))).key


def _all_gather_linear(
    x: DTensor, weights: Ds, biases: Maybe, dim: int, full: int, key: str, algorithm: str, keep: bool
) -> list[DTensor]:
    mesh, axis = x.device_mesh, _axis(key)
    group = _group(mesh, key)
    *outs, gathered = _ops.all_gather_linear(
        x.to_local(), _locals(weights), _locals(biases), dim, full, group, algorithm, keep
    )
    shape = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    replicated: list[Placement] = [Replicate()] * mesh.ndim
    columns = _replace_placement(x.placements, axis, Shard(x.ndim - 1))
    wrapped = [
        _wrapped(out, mesh, columns, (*shape[:-1], weight.shape[0])) for out, weight in zip(outs, weights, strict=True)
    ]
    if not keep:
        shape = (0,)
    return [
        *wrapped,
        _wrapped(gathered, mesh, _replace_placement(x.placements, axis, Replicate()) if keep else replicated, shape),
    ]


def _columns_of(grads: Ds, like: DTensor, axis: int) -> list[T]:
    """Local shards of output gradients, in the layout of the outputs."""
    placements = _replace_placement(like.placements, axis, Shard(like.ndim - 1))
    return [grad.redistribute(placements=placements).to_local() for grad in grads]


def _terms_of(grad: DTensor, like: DTensor, axis: int) -> T:
    """The local term of a sum over the axis, of the gradient of gathered rows, in the layout of these on other axes."""
    if grad.placements[axis].is_partial():
        placements = _replace_placement(like.placements, axis, grad.placements[axis])
        return grad.redistribute(placements=placements).to_local().contiguous()
    local = grad.redistribute(placements=_replace_placement(like.placements, axis, Replicate())).to_local()
    return local / grad.device_mesh.size(axis)


def _weight_placements(like: DTensor, axis: int, dim: int) -> list[Placement]:
    return [
        Shard(dim) if n == axis else Partial() if placement.is_shard() else Replicate()
        for n, placement in enumerate(like.placements)
    ]


def _all_gather_linear_backward(
    grads: Ds,
    other: DTensor | None,
    rows: DTensor,
    weights: Ds,
    gathered: T | None,
    input_grad: bool,
    weight_grads: list[bool],
    dim: int,
    full: int,
    key: str,
    algorithm: str,
) -> list[DTensor]:
    mesh, axis = rows.device_mesh, _axis(key)
    group = _group(mesh, key)
    results = _ops.all_gather_linear_backward(
        _columns_of(grads, rows, axis),
        None if other is None else _terms_of(other, rows, axis),
        rows.to_local(),
        _locals(weights),
        gathered,
        input_grad,
        weight_grads,
        dim,
        full,
        group,
        algorithm,
    )
    shape = (*rows.shape[:dim], full, *rows.shape[dim + 1 :])
    wrapped = []
    if input_grad:
        wrapped.append(_wrapped(results.pop(0), mesh, _replace_placement(rows.placements, axis, Shard(dim)), shape))
    selected = [weight for weight, need in zip(weights, weight_grads, strict=True) if need]
    placements = _weight_placements(rows, axis, 0)
    return wrapped + [_wrapped(dw, mesh, placements, w.shape) for dw, w in zip(results, selected, strict=True)]


def _linear_reduce_scatter(x: DTensor, weight: DTensor, dim: int, key: str, algorithm: str) -> DTensor:
    mesh = x.device_mesh
    out = _ops.linear_reduce_scatter(x.to_local(), weight.to_local(), dim, _group(mesh, key), algorithm)
    return _wrapped(
        out, mesh, _replace_placement(x.placements, _axis(key), Shard(dim)), (*x.shape[:-1], weight.shape[0])
    )


def _linear_reduce_scatter_backward(
    grad: DTensor,
    x: DTensor,
    weight: DTensor,
    input_grad: bool,
    weight_grad: bool,
    dim: int,
    key: str,
    algorithm: str,
) -> list[DTensor]:
    mesh, axis = x.device_mesh, _axis(key)
    local = grad.redistribute(placements=_replace_placement(x.placements, axis, Shard(dim))).to_local()
    results = _ops.linear_reduce_scatter_backward(
        local.contiguous(), x.to_local(), weight.to_local(), input_grad, weight_grad, dim, _group(mesh, key), algorithm
    )
    wrapped = []
    if input_grad:
        wrapped.append(_wrapped(results.pop(0), mesh, list(x.placements), x.shape))
    if weight_grad:
        wrapped.append(_wrapped(results.pop(0), mesh, _weight_placements(x, axis, 1), weight.shape))
    full_grad = _wrapped(results[0], mesh, _replace_placement(x.placements, axis, Replicate()), grad.shape)
    return [*wrapped, full_grad]


def _linear_all_reduce(x: DTensor, weight: DTensor, key: str, algorithm: str) -> DTensor:
    mesh = x.device_mesh
    out = _ops.linear_all_reduce(x.to_local(), weight.to_local(), _group(mesh, key), algorithm)
    return _wrapped(
        out, mesh, _replace_placement(x.placements, _axis(key), Replicate()), (*x.shape[:-1], weight.shape[0])
    )


def _column_linear(x: DTensor, weights: Ds, biases: Maybe, key: str, algorithm: str) -> list[DTensor]:
    mesh, axis = x.device_mesh, _axis(key)
    outs = _ops.column_linear(x.to_local(), _locals(weights), _locals(biases), _group(mesh, key), algorithm)
    columns = _replace_placement(x.placements, axis, Shard(x.ndim - 1))
    return [
        _wrapped(out, mesh, columns, (*x.shape[:-1], weight.shape[0]))
        for out, weight in zip(outs, weights, strict=True)
    ]


def _column_linear_backward(
    grads: Ds, x: DTensor, weights: Ds, weight_grads: list[bool], key: str, algorithm: str
) -> list[DTensor]:
    mesh, axis = x.device_mesh, _axis(key)
    dx, *dws = _ops.column_linear_backward(
        _columns_of(grads, x, axis), x.to_local(), _locals(weights), weight_grads, _group(mesh, key), algorithm
    )
    selected = [weight for weight, need in zip(weights, weight_grads, strict=True) if need]
    placements = _weight_placements(x, axis, 0)
    return [
        _wrapped(dx, mesh, list(x.placements), x.shape),
        *(_wrapped(dw, mesh, placements, w.shape) for dw, w in zip(dws, selected, strict=True)),
    ]


def _rule(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cls, func, types, args=(), kwargs=None: function(*args, **(kwargs or {}))


for _function in (
    _all_gather_linear,
    _all_gather_linear_backward,
    _linear_reduce_scatter,
    _linear_reduce_scatter_backward,
    _linear_all_reduce,
    _column_linear,
    _column_linear_backward,
):
    torch.library.register_torch_dispatch(
        f"{NAMESPACE}::{_function.__name__[1:]}", DTensor, _rule(_function), lib=LIBRARY
    )
