"""Gradient norms and clipping over plain tensors and DTensors of any mix of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.errors import GradientError, Problem, short_list
from parallelize.groups import Group, axis_group, mesh_spec
from parallelize.layout import even_interval
from parallelize.parameters import SHARED, STAGE, Shared
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

    Plain and DTensor gradients, of any mesh, may be mixed. What several ranks hold is counted once, tied copies on other
    pipeline stages too, so the norm is that of the unsharded model. Works on the local shards: one norm each, one
    all-reduce a set of sharding axes, one over the stages.

    Args:
        parameters: a model, or parameters. Pass the model where `fully_shard` was applied by hand to one whose key/value
            heads are held by several ranks, and where a pipeline stage may have nothing that trains.

    Returns: a scalar plain tensor, the same on every rank.
    Raises: GradientError `nonfinite-gradients` (a RuntimeError) for a norm that is not finite, with `error_if_nonfinite`:
        on every rank, before anything is scaled; given a model, with the parameters' names.
    Source: as `torch.nn.utils.clip_grad_norm_`.
    """
    norm_type = float(norm_type)
    given = parameters if isinstance(parameters, nn.Module) else _listed(parameters)
    found = _Buckets()
    for grad, shared, counted in _gradients(given):
        found.add(grad, shared, counted)
    stages = _stages_of(given)
    if not found.locals and stages is None:
        return torch.tensor(0.0)
    devices = {local.device for local in found.locals}
    total = _total_norm(found, norm_type, found.locals[0].device if len(devices) > 1 else None, stages)
    if error_if_nonfinite and not torch.isfinite(total):
        raise _nonfinite(given, norm_type, total)
    scale = (max_norm / (total + 1e-6)).clamp_(max=1.0)
    if foreach is False or len(devices) > 1:
        for local in found.locals:
            local.mul_(scale.to(local.device))
    elif found.locals:
        torch._foreach_mul_(found.locals, scale)
    return total


class _Buckets:
    """Local gradients by the groups over which their shards lie.

    `weights`: of a bucket's pieces, where some count less than once.
    """

    def __init__(self) -> None:
        self.locals: list[torch.Tensor] = []
        self.pieces: dict[Groups, list[torch.Tensor]] = {}
        self.weights: dict[Groups, list[float]] = {}
        self._known: dict[Any, Groups] = {}

    def add(self, grad: torch.Tensor, shared: Shared, counted: bool) -> None:
        local, groups = grad, _NOWHERE
        if isinstance(grad, DTensor):
            local, spec = _local_of(grad), _spec_of(grad)
            key = (id(spec.mesh), spec.placements)
            found = self._known.get(key)
            groups = self._known.setdefault(key, _sharding_groups(grad)) if found is None else found
        self.locals.append(local)
        pieces = self.pieces.setdefault(groups, [])
        if not counted:  # a copy of what another stage counts
            pieces.append(_zero(local))
        elif shared:
            held = self.weights.setdefault(groups, [])
            for piece, weight in _pieces(grad, local, shared):
                held += [1.0] * (len(pieces) - len(held)) + [weight]
                pieces.append(piece)
        else:
            pieces.append(local if local.numel() else _zero(local))


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _stages_of(parameters: Any) -> Group | None:
    """The pipeline's group, where these parameters are one stage's."""
    held = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    marks = {mark.group for tensor in held if (mark := tensor.__dict__.get(STAGE)) is not None}
    if not marks and isinstance(parameters, nn.Module):
        cut = parameters.__dict__.get("_parallelize_cut")
        return cut.group if cut is not None else None
    return next(iter(marks), None)


def _nonfinite(given: Any, norm_type: float, total: torch.Tensor) -> GradientError:
    """The same error on every rank: each one's parameters, told to all where a model says who all are."""
    rows: list[tuple[str, str]] = []
    if isinstance(given, nn.Module):
        bad = [n for n, p in given.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
        everyone: list[Any] = [bad]
        mesh = _mesh_of(given)
        if mesh is not None and mesh.size() > 1:
            everyone = [None] * mesh.size()
            dist.all_gather_object(everyone, bad, group=axis_group(mesh, *mesh_spec(mesh).names))
        rows = [(f"rank {rank}", short_list(names, 4)) for rank, names in enumerate(everyone) if names][:16]
    what = f"the gradient norm of order {norm_type} is {total.item()}, so gradients cannot be clipped"
    fix = "nothing was changed: skip this batch, or look for the loss's scale"
    return GradientError(Problem("nonfinite-gradients", what, rows=tuple(rows), fix=fix))


def _mesh_of(module: nn.Module) -> DeviceMesh | None:
    for key in ("_parallelize_data", "_parallelize_record", "_parallelize_cut"):
        if key in module.__dict__:
            return module.__dict__[key].mesh
    return None


def _is_finite(grad: Any) -> bool:
    local = _local_of(grad) if isinstance(grad, DTensor) else grad
    return bool(torch.isfinite(local).all())


def _gradients(parameters: Any) -> Iterator[tuple[torch.Tensor, Shared, bool]]:
    """Gradients, with the parts of them that several tp ranks hold, and whether they count here."""
    known = shared_of_parameters(parameters) if isinstance(parameters, nn.Module) else None
    ties = parameters.__dict__.get("_parallelize_ties") if isinstance(parameters, nn.Module) else None
    copies = ties.copies() if ties is not None else ()
    for tensor in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        grad = tensor.grad
        if grad is not None:
            mark = tensor.__dict__.get(STAGE)
            shared = tensor.__dict__.get(SHARED, ()) if known is None else known.get(id(tensor), ())
            yield grad, shared, id(tensor) not in copies and (mark is None or mark.counted)


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


def _total_norm(found: _Buckets, norm_type: float, device: torch.device | None, stages: Group | None) -> torch.Tensor:
    """The norm of all buckets; `device`: where to add up, for gradients on several."""
    largest = norm_type == torch.inf
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    sums = list(_sums(found, norm_type, device)) if found.locals else []
    if stages is not None:  # a stage without gradients takes part too
        zero = sums[0].new_zeros(()) if sums else torch.zeros((), device=stages_device(stages))
        sums = [torch.stack([zero, *sums]).max() if largest else torch.stack([zero, *sums]).sum()]
        sums[0] = sums[0].double()  # stages may differ in dtype
        stages.all_reduce(sums[0], op)
    total = sums[0] if len(sums) == 1 else torch.stack(sums)
    return total.max() if largest else total.sum().pow_(1.0 / norm_type)


def stages_device(group: Group) -> torch.device:
    """Where the pipeline's tensors lie, for a stage that has none of its own here."""
    if "cuda" in group.backends or "nccl" in group.backends.values():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sums(found: _Buckets, norm_type: float, device: torch.device | None) -> Iterator[torch.Tensor]:
    """Of each bucket, the sum of powers (or the maximum) over its groups."""
    largest = norm_type == torch.inf
    each = torch._foreach_norm([grad for grads in found.pieces.values() for grad in grads], norm_type)
    norms = torch.stack(each if device is None else [norm.to(device) for norm in each])
    norms = norms if norms.dtype == torch.float64 else norms.float()  # squares overflow half precision
    # a maximum over ranks may lose a NaN, and keeps an infinity
    norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf) if largest else norms.pow_(norm_type)
    for (groups, grads), part in zip(
        found.pieces.items(), norms.split([len(grads) for grads in found.pieces.values()]), strict=True
    ):
        held = found.weights.get(groups)
        if held is not None and not largest:
            part = part * part.new_tensor(held + [1.0] * (len(grads) - len(held)))
        part = part.max() if largest else part.sum()
        for group in groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        yield part
