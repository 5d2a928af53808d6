"""Gradient norms and clipping over plain tensors and DTensors of any mix of layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm together is at most `max_norm`; return the norm before.

    Plain and DTensor gradients, of any mesh, may be mixed. What several ranks hold is counted once, so the norm is that
    of the unsharded model. Works on the local shards: one norm each, one all-reduce a set of sharding axes.

    Returns: a scalar plain tensor, the same on every rank.
    Raises: RuntimeError for a norm that is not finite, with `error_if_nonfinite`.
    Source: as `torch.nn.utils.clip_grad_norm_`.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [grad for param in params if (grad := param.grad) is not None]
    if not grads:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    buckets: dict[Any, list[torch.Tensor]] = {}
    shares: dict[Any, list[float]] = {}
    locals_ = []
    keys: dict[int, Any] = {}
    for param, grad in ((p, p.grad) for p in params if p.grad is not None):
        local = private.local_of(grad) if isinstance(grad, DTensor) else grad
        key = None
        if isinstance(grad, DTensor):
            spec = private.spec_of(grad)
            key = keys.get(id(spec)) or keys.setdefault(id(spec), _sharding_groups(grad))
        locals_.append(local)
        buckets.setdefault(key, []).append(local)
        shares.setdefault(key, []).append(getattr(param, "_parallelize_share", 1.0))
    total = _total_norm(buckets, shares, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {total.item()}, so gradients cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp_(max=1.0)
    _scale(locals_, scale, foreach)
    return total


def _scale(grads: list[torch.Tensor], scale: torch.Tensor, foreach: bool | None) -> None:
    if foreach is False or len({grad.device for grad in grads}) > 1:
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    else:
        torch._foreach_mul_(grads, scale.to(grads[0].device))


def _sharding_groups(grad: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which this gradient's shards lie."""
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if private.shard_dim(placement) is not None and mesh.size(axis) > 1
    )


def _total_norm(buckets: dict, shares: dict, norm_type: float) -> torch.Tensor:
    sums = []
    for groups, grads in buckets.items():
        norms = torch.stack(torch._foreach_norm(grads, norm_type))
        if norm_type == torch.inf:
            part, op = norms.max(), dist.ReduceOp.MAX
        else:
            powers = norms.pow_(norm_type)
            if any(share != 1.0 for share in shares[groups]):
                powers = powers * powers.new_tensor(shares[groups])
            part, op = powers.sum(), dist.ReduceOp.SUM
        for group in groups or ():
            dist.all_reduce(part, op, group=group)
        sums.append(part)
    if norm_type == torch.inf:
        return torch.stack(sums).max()
    return (sums[0] if len(sums) == 1 else torch.stack(sums).sum()).pow(1.0 / norm_type)
