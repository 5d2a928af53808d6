"""Gradient norms and clipping over plain tensors and DTensors of any mix of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.layout import even_interval
from parallelize.parameters import SHARED, Shared
from parallelize.sharding import shared_of_parameters

_local_of, _spec_of = private.local_of, private.spec_of
Groups = tuple[dist.ProcessGroup, ...]
_NOWHERE: Groups = ()


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm together is at most `max_norm`; return the norm before.

    Plain and DTensor gradients, of any mesh, may be mixed. What several ranks hold is counted once, so the norm is that
    of the unsharded model. Works on the local shards: one norm each, one all-reduce a set of sharding axes.

    Args:
        parameters: a planned model, or parameters. Pass the model where `fully_shard` was applied to one whose
            key/value heads are held by several ranks: only the model knows which elements those are.

    Returns: a scalar plain tensor, the same on every rank.
    Raises: RuntimeError for a norm that is not finite, with `error_if_nonfinite`.
    Source: as `torch.nn.utils.clip_grad_norm_`.
    """
    norm_type = float(norm_type)
    buckets: dict[Groups, list[torch.Tensor]] = {}
    weights: dict[Groups, list[float]] = {}
    known: dict[Any, Groups] = {}
    locals_ = []
    for grad, shared in _gradients(parameters):
        local, groups = grad, _NOWHERE
        if isinstance(grad, DTensor):
            local, spec = _local_of(grad), _spec_of(grad)
            key = (id(spec.mesh), spec.placements)
            found = known.get(key)
            groups = known.setdefault(key, _sharding_groups(grad)) if found is None else found
        locals_.append(local)
        pieces = buckets.setdefault(groups, [])
        if shared:
            held = weights.setdefault(groups, [])
            for piece, weight in _pieces(grad, local, shared):
                held += [1.0] * (len(pieces) - len(held)) + [weight]
                pieces.append(piece)
        else:
            pieces.append(local if local.numel() else _zero(local))
    if not locals_:
        return torch.tensor(0.0)
    devices = {local.device for local in locals_}
    total = _total_norm(buckets, weights, norm_type, locals_[0].device if len(devices) > 1 else None)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {total.item()}, so gradients cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp_(max=1.0)
    if foreach is False or len(devices) > 1:
        for local in locals_:
            local.mul_(scale.to(local.device))
    else:
        torch._foreach_mul_(locals_, scale)
    return total


def _gradients(parameters: Any) -> Iterator[tuple[torch.Tensor, Shared]]:
    """Gradients, with the parts of them that several tp ranks hold."""
    if isinstance(parameters, nn.Module):
        shared = shared_of_parameters(parameters)
        for parameter in parameters.parameters():
            if parameter.grad is not None:
                yield parameter.grad, shared.get(id(parameter), ())
        return
    for tensor in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        grad = tensor.grad
        if grad is not None:
            yield grad, tensor.__dict__.get(SHARED, ())


def _zero(like: torch.Tensor) -> torch.Tensor:
    """What an empty shard contributes; an infinity norm of nothing is an error in PyTorch."""
    return like.new_zeros(1)


def _pieces(grad: torch.Tensor, local: torch.Tensor, shared: Shared) -> Iterator[tuple[torch.Tensor, float]]:
    """The local gradient cut along the dim on which ranks share, each piece with one over its holders."""
    dim, first = shared[0][0], _first_row(grad, shared[0][0])
    at, size = 0, local.shape[dim]
    for _, start, stop, holders in shared:
        start, stop = (min(max(row - first, 0), size) for row in (start, stop))
        for low, high, weight in ((at, start, 1.0), (start, stop, 1.0 / holders)):
            if high > low:
                yield local.narrow(dim, low, high - low), weight
        at = max(at, stop)
    if at < size:
        yield local.narrow(dim, at, size - at), 1.0


def _first_row(grad: torch.Tensor, dim: int) -> int:
    """Where this rank's shard begins within its tp shard, when ZeRO has cut that further."""
    if not isinstance(grad, DTensor) or grad.device_mesh.ndim == 1:
        return 0
    mesh, names = grad.device_mesh, grad.device_mesh.mesh_dim_names or ()
    rows = grad.shape[dim] // mesh.size(names.index("tp"))
    for axis, placement in enumerate(grad.placements):
        if names[axis] != "tp" and private.shard_dim(placement) == dim:
            return even_interval(rows, mesh.size(axis), mesh.get_local_rank(axis))[0]
    return 0


def _sharding_groups(grad: DTensor) -> Groups:
    """The groups over which this gradient's shards lie."""
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if private.shard_dim(placement) is not None and mesh.size(axis) > 1
    )


def _total_norm(buckets: dict, weights: dict, norm_type: float, device: torch.device | None) -> torch.Tensor:
    """The norm of all buckets; `device`: where to add up, for gradients on several."""
    each = torch._foreach_norm([grad for grads in buckets.values() for grad in grads], norm_type)
    norms = torch.stack(each if device is None else [norm.to(device) for norm in each])
    norms = norms if norms.dtype == torch.float64 else norms.float()  # squares overflow half precision
    largest = norm_type == torch.inf
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    parts = (norms if largest else norms.pow_(norm_type)).split([len(grads) for grads in buckets.values()])
    sums = []
    for (groups, grads), part in zip(buckets.items(), parts, strict=True):
        if groups in weights and not largest:
            held = weights[groups]
            part = part * part.new_tensor(held + [1.0] * (len(grads) - len(held)))
        part = part.max() if largest else part.sum()
        for group in groups:
            dist.all_reduce(part, op, group=group)
        sums.append(part)
    total = sums[0] if len(sums) == 1 else torch.stack(sums)
    return total.max() if largest else total.sum().pow_(1.0 / norm_type)
