"""A DTensor that is not computed yet: what it is to be is known, and its first reader decides how it is computed.

`F.linear` and `redistribute` are two calls, and a collective overlaps with a matmul only where one op runs both. So the first of
the two returns one of these, and the second computes it. Any other reader gets what PyTorch would have computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Placement

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor
_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.register_hook,
    ),
}


class DeferredDTensor(DTensor):
    """A DTensor with its shape, dtype, mesh and placements, which `value` computes.

    Functions of torch read `value`. What takes tensors without asking them (`autograd.Function.apply`) would find no graph
    behind it: a gradient that arrives here is an error.
    """

    compute: Callable[[], Any]
    redistributed: Callable[[Any], Any]
    computed: DTensor | None
    reads: list[tuple[T, int]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = private.tree_map(value_of, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @property
    def value(self) -> Any:
        """The DTensor, computed once. Reading it in a block without gradients does not lose its graph."""
        if self.computed is None:
            self._check_unwritten()
            with torch.set_grad_enabled(self.requires_grad or torch.is_grad_enabled()):
                self.computed = value_of(self.compute())
        return self.computed

    @property
    def _local_tensor(self) -> T:
        return private.local_of(self.value)

    @_local_tensor.setter
    def _local_tensor(self, _: T) -> None:
        """PyTorch's constructor sets the tensor that it was given, which has no values."""

    def to_local(self, *, grad_placements: Any = None) -> T:
        """As that of the computed DTensor."""
        return self.value.to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> T:
        """As that of the computed DTensor."""
        return self.value.full_tensor(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False, **dtypes: Any
    ) -> DTensor:
        """As that of the computed DTensor; by one op, together with what computes it, where there is one."""
        plain = device_mesh in (None, self.device_mesh) and placements is not None and not any(dtypes.values())
        if self.computed is None and plain:
            self._check_unwritten()
            out = self.redistributed(tuple(placements))
            if out is not None:
                return out
        return self.value.redistribute(device_mesh, placements, async_op=async_op, **dtypes)

    def _check_unwritten(self) -> None:
        """Raises: ModelError `deferred-dtensor` where this would be computed from other values than when it was made."""
        if any(_version(tensor) != version for tensor, version in self.reads):
            what = "a tensor that a linear or a gather reads was written to before its result was read"
            fix = "read the result first, or write to a copy; or do both outside of overlapped_linears()"
            raise ModelError(Problem("deferred-dtensor", what, fix=fix))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredDTensor({list(self.shape)}, {self.device_mesh}, {self.placements})"


D = TypeVar("D", bound=DeferredDTensor)


def deferred_dtensor(
    cls: type[D],
    compute: Callable[[], T],
    redistributed: Callable[[Any], T | None],
    mesh: Any,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    reads: tuple[Any, ...],
    like: T,
) -> D:
    """A DTensor of the class `cls` that is not computed yet.

    Args:
        compute: computes it as PyTorch does.
        redistributed: computes it with these placements by one op; None where no op does.
        shape: of the full tensor.
        reads: the DTensors that it is computed from. like: a plain tensor of its dtype and device.
    """
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in reads)
    spec = private.spec(mesh, placements, torch.empty(shape, dtype=like.dtype, device="meta"))
    deferred: Any = cls.__new__(cls, like.new_empty(1).expand(shape), spec, requires_grad=trains)
    deferred.compute, deferred.redistributed, deferred.computed = compute, redistributed, None
    deferred.reads = [(tensor, _version(tensor)) for tensor in (*reads, *map(private.local_of, reads))]
    if trains:
        deferred.register_hook(_refuse_gradient)
    return deferred


def value_of(value: Any) -> Any:
    """The DTensor that a deferred one is to be; anything else is returned itself."""
    return value.value if isinstance(value, DeferredDTensor) else value


def _version(tensor: T) -> int:
    """How often a tensor was written to, by itself or by a view; inference tensors do not know."""
    return 0 if tensor.is_inference() else tensor._version


def _refuse_gradient(_: T) -> None:
    what = "an autograd.Function read a DTensor that was not computed yet, and would lose its gradient"
    fix = "call this module outside of overlapped_linears(): full backward hooks and autograd.Functions on DTensors read so"
    raise ModelError(Problem("deferred-dtensor", what, fix=fix))
