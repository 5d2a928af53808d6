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
        if not isinstance(grad, DTensor):
            local, groups = grad, _NOWHERE
        else:
            local = private.local_of(grad)
            spec = private.spec_of(grad)
            key = (id(spec.mesh), spec.placements)
            if key not in known:
                known[key] = _sharding_groups(grad)
            groups = known[key]
        locals_.append(local)
        pieces = buckets.setdefault(groups, [])
        if not shared:
            pieces.append(local if local.numel() else _zero(local))
            continue
        held = weights.setdefault(groups, [])
        for piece, weight in _pieces(grad, local, shared):
            held += [1.0] * (len(pieces) - len(held)) + [weight]
            pieces.append(piece)
    if not locals_:
        return torch.tensor(0.0)
    total = _total_norm(buckets, weights, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {total.item()}, so gradients cannot be clipped")
    _scale(locals_, (max_norm / (total + 1e-6)).clamp_(max=1.0), foreach)
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
        if tensor.grad is not None:
            yield tensor.grad, getattr(tensor, SHARED, ())


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


def _scale(grads: list[torch.Tensor], scale: torch.Tensor, foreach: bool | None) -> None:
    if foreach is False or len({grad.device for grad in grads}) > 1:
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    else:
        torch._foreach_mul_(grads, scale.to(grads[0].device))


def _sharding_groups(grad: DTensor) -> Groups:
    """The groups over which this gradient's shards lie."""
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if private.shard_dim(placement) is not None and mesh.size(axis) > 1
    )


def _on_one_device(norms: tuple[torch.Tensor, ...], device: torch.device) -> list[torch.Tensor]:
    return [norm if norm.device == device else norm.to(device) for norm in norms]


def _total_norm(buckets: dict, weights: dict, norm_type: float) -> torch.Tensor:
    sums = []
    total_on = next(iter(buckets.values()))[0].device
    for groups, grads in buckets.items():
        norms = torch.stack(_on_one_device(torch._foreach_norm(grads, norm_type), total_on))
        norms = norms if norms.dtype == torch.float64 else norms.float()  # squares overflow half precision
        if norm_type == torch.inf:
            part, op = norms.max(), dist.ReduceOp.MAX
        else:
            part, op = norms.pow_(norm_type), dist.ReduceOp.SUM
            if groups in weights:
                held = weights[groups]
                part *= part.new_tensor(held + [1.0] * (len(grads) - len(held)))
            part = part.sum()
        for group in groups:
            dist.all_reduce(part, op, group=group)
        sums.append(part)
    if norm_type == torch.inf:
        return torch.stack(sums).max()
    return (sums[0] if len(sums) == 1 else torch.stack(sums).sum()).pow_(1.0 / norm_type)
