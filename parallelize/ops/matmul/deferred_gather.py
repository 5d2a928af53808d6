"""Gathers of DTensors that wait for their first reader, in a thread where `overlapped_linears()` is entered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.matmul.deferred_dtensor import DeferredDTensor, deferred_dtensor

_LOCAL = threading.local()


class Gathered(DeferredDTensor):
    """A DTensor that is gathered along one axis when it is read: by the first column linear, or as PyTorch does.

    Attributes:
        shard: what is gathered. axis: of the mesh.
    """

    shard: DTensor
    axis: int

    def shard_to_gather(self) -> DTensor:
        """The shard, as it was when this was made. Raises: ModelError `deferred-dtensor`."""
        self._check_unwritten()
        return self.shard


def defer_gathers(change: int) -> None:
    """Enter (1) or leave (-1) a block in whose thread `DTensor.redistribute` returns a `Gathered` for a gather of rows."""
    _intercept_redistribution()
    _LOCAL.depth = getattr(_LOCAL, "depth", 0) + change


@cache
def _intercept_redistribution() -> None:
    private.wrap_in_torch("redistribution", _redistributing)


def _redistributing(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @wraps(stock)
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        run = partial(stock, self, device_mesh, placements, **options)
        if not getattr(_LOCAL, "depth", 0) or placements is None or torch.compiler.is_compiling() or _is_gradient():
            return run()
        same_mesh = device_mesh is None or device_mesh == self.device_mesh
        dtypes = any(value for name, value in options.items() if name != "async_op")
        axis = _gathered_axis(self, tuple(placements)) if same_mesh and not dtypes else None
        return run() if axis is None else _gathered(self, axis, tuple(placements), run)

    return redistribute


def _is_gradient() -> bool:
    """Whether a backward formula runs now. Forwards that are computed again in backward have gradients enabled."""
    return private.backward_id() != -1 and not torch.is_grad_enabled()


def _gathered(shard: DTensor, axis: int, placements: tuple[Placement, ...], run: Callable[[], DTensor]) -> Gathered:
    mesh, shape, like = shard.device_mesh, tuple(shard.shape), private.local_of(shard)
    out = deferred_dtensor(Gathered, run, lambda _: None, mesh, placements, shape, (shard,), like)
    out.shard, out.axis = shard, axis
    return out


def _gathered_axis(x: DTensor, placements: tuple[Placement, ...]) -> int | None:
    """The only axis along which a redistribution changes anything, if it gathers rows there."""
    changed = [n for n, (old, new) in enumerate(zip(x.placements, placements, strict=True)) if old != new]
    if len(changed) != 1 or not placements[changed[0]].is_replicate():
        return None
    old = x.placements[changed[0]]
    rows = type(old) is Shard and old.dim % x.ndim < x.ndim - 1
    return changed[0] if rows and x.device_mesh.size(changed[0]) > 1 else None
