"""Gradient norms and clipping over plain tensors and DTensors of any mix of layouts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import GradientError, Problem, short_list
from parallelize.base.layout import even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group, first_alike
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.layout_tensor.layout_shard import layout_axis
from parallelize.state.records import Shared, applied, mark_of, mesh_of, pipeline_cut
from parallelize.state.sharding import shared_of_parameters
from parallelize.state.tensor_tables import TensorTable

_local_of = private.local_of
_UNSHARDED: Groups = ()


@torch.no_grad()
def clip_grad_norm_(
    parameters: AnyModel | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their total norm is at most `max_norm`; return the norm before.

    Plain and DTensor gradients, of any meshes, may be mixed. Elements that several ranks store are counted once, and so
    are tied copies on other pipeline stages: the norm is that of the unsharded model.

    Args:
        parameters: a model, or parameters. Pass the model if `fully_shard` was applied by hand and several ranks store
            the same key/value heads, or if a pipeline stage may have no trained parameter.
        max_norm: the largest norm of all gradients together.
        norm_type: the order of the norm; `inf` for the largest absolute value.
        error_if_nonfinite: raise an error for a norm that is not finite.
        foreach: False scales one gradient after another. Default: all of a device together.

    Returns: a scalar plain tensor, the same on every rank.
    Raises: GradientError `nonfinite-gradients` (a RuntimeError), with `error_if_nonfinite`: on every rank, before
        anything is scaled; with the parameters' names, given a model.
    Cost: norms of local tensors, one all-reduce of a number per axis of each set of sharding axes, and one over the
        pipeline stages.
    Source: as `torch.nn.utils.clip_grad_norm_`.
    """
    model: Any = parameters if isinstance(parameters, nn.Module) or hasattr(parameters, "module") else None
    source = _listed(parameters) if model is None else module_of(model)
    gradients, total = _norm(source, float(norm_type), error_if_nonfinite)
    if total is None:
        return torch.tensor(0.0)
    devices = {local.device for local in gradients.locals}
    scale = (max_norm / (total + 1e-6)).clamp_(max=1.0)
    if foreach is False or len(devices) > 1:
        for local in gradients.locals:
            local.mul_(scale.to(local.device))
    elif gradients.locals:
        torch._foreach_mul_(gradients.locals, scale)
    return total


@torch.no_grad()
def norm_of(parameters: Iterable[Any], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """The norm that `clip_grad_norm_` would compute for these parameters; see there."""
    total = _norm(list(parameters), float(norm_type), error_if_nonfinite)[1]
    return torch.tensor(0.0) if total is None else total


def _norm(source: Any, norm_type: float, error_if_nonfinite: bool) -> tuple[_LocalGradients, torch.Tensor | None]:
    """The gradients and their norm; None where there is nothing on this rank, nor on other stages."""
    gradients, stages = _gradients(source)
    if not gradients.locals and stages is None:
        return gradients, None
    total = _total_norm(gradients, norm_type, stages)
    if error_if_nonfinite and not torch.isfinite(total):
        raise _nonfinite(source, norm_type, total)
    return gradients, total


@dataclass
class _GroupGradients:
    """Local gradients that the same groups shard, in chunks. `weights`: of the chunks, where some count less than
    once."""

    chunks: list[torch.Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, chunk: torch.Tensor) -> None:
        self.chunks.append(chunk)

    def add_weighted(self, chunk: torch.Tensor, weight: float) -> None:
        self.weights += [1.0] * (len(self.chunks) - len(self.weights)) + [weight]
        self.chunks.append(chunk)

    def apply_weights(self, powers: torch.Tensor) -> torch.Tensor:
        """Multiply one number per chunk by the chunk's weight."""
        if not self.weights:
            return powers
        return powers * powers.new_tensor(self.weights + [1.0] * (len(self.chunks) - len(self.weights)))


class _LocalGradients:
    """Local gradients by the groups that shard them."""

    def __init__(self) -> None:
        self.locals: list[torch.Tensor] = []
        self.by_groups: dict[Groups, _GroupGradients] = {}

    def add(self, grad: torch.Tensor, shared: Shared, counted: bool) -> None:
        """`shared`: intervals that several tp ranks store. `counted`: on this pipeline stage."""
        local, groups = grad, _UNSHARDED
        if isinstance(grad, DTensor):
            local, groups = _local_of(grad), sharding_groups(grad)
        self.locals.append(local)
        same_groups = self.by_groups.get(groups)
        if same_groups is None:
            same_groups = self.by_groups[groups] = _GroupGradients()
        if not counted:  # a copy, which another stage counts
            same_groups.add(_zero(local))
        elif shared:
            for chunk, weight in _weighted_chunks(grad, local, shared):
                same_groups.add_weighted(chunk, weight)
        else:
            same_groups.chunks.append(local if local.numel() else _zero(local))


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _nonfinite(source: Any, norm_type: float, total: torch.Tensor) -> GradientError:
    """The same error on every rank: the parameters of all ranks, where a model has the mesh."""
    rows: list[tuple[str, str]] = []
    if isinstance(source, nn.Module):
        names = [n for n, p in source.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
        by_rank: list[Any] = [names]
        mesh = mesh_of(source)
        if mesh is not None and mesh.size > 1:
            by_rank = [None] * mesh.size
            dist.all_gather_object(by_rank, names, group=mesh.world.pg)
        rows = [(f"rank {rank}", short_list(names, 4)) for rank, names in enumerate(by_rank) if names][:16]
    what = f"the gradient norm of order {norm_type} is {total.item()}, so gradients cannot be clipped"
    fix = "nothing was changed: skip this batch, or check the scale of the loss"
    return GradientError(Problem("nonfinite-gradients", what, rows=tuple(rows), fix=fix))


def _is_finite(grad: Any) -> bool:
    local = private.plain_local(grad)
    return bool(torch.isfinite(local).all())


def _gradients(source: Any) -> tuple[_LocalGradients, Group | None]:
    """The gradients of these parameters, and the pipeline's group, if they are those of one stage."""
    module = source if isinstance(source, nn.Module) else None
    shared_of = shared_of_parameters(source) if module is not None else None
    ties = applied(source).ties if module is not None else None
    copies = ties.copies() if ties is not None else ()
    gradients, stages = _LocalGradients(), None
    for tensor in source if module is None else module.parameters():
        mark = mark_of(tensor)
        shared, stage = mark.shared, mark.stage
        if stage is not None:
            stages = stage.group
        grad = tensor.grad
        if grad is not None:
            shared = shared if shared_of is None else shared_of.get(id(tensor), ())
            counted = (stage is None or stage.counted) and not (copies and id(tensor) in copies)
            gradients.add(grad, shared, counted)
    if stages is None and module is not None:
        cut = pipeline_cut(module)
        stages = None if cut is None else cut.group
    return gradients, stages


def _zero(like: torch.Tensor) -> torch.Tensor:
    """What an empty shard contributes: PyTorch refuses an infinity norm of no elements."""
    return like.new_zeros(1)


def _weighted_chunks(grad: torch.Tensor, local: torch.Tensor, shared: Shared) -> Iterator[tuple[torch.Tensor, float]]:
    """(chunk, weight) of a local gradient, split where other ranks store the same elements; the weight is 1 / their
    number."""
    dim = shared[0][0]
    first, offset, size = _first_index(grad, dim), 0, local.shape[dim]
    for _, start, stop, num_ranks in shared:
        start, stop = (min(max(index - first, 0), size) for index in (start, stop))
        for low, high, weight in ((offset, start, 1.0), (start, stop, 1.0 / num_ranks)):
            if high > low:
                yield local.narrow(dim, low, high - low), weight
        offset = max(offset, stop)
    if offset < size:
        yield local.narrow(dim, offset, size - offset), 1.0


def _first_index(grad: torch.Tensor, dim: int) -> int:
    """Where this rank's shard begins within its tp shard, which ZeRO may shard further."""
    if not isinstance(grad, DTensor) or grad.device_mesh.ndim == 1:
        return 0
    mesh = grad.device_mesh
    layout_number = layout_axis(mesh)
    assert layout_number is not None, "elements that several ranks of tp store"
    local_size = grad.shape[dim] // mesh.size(layout_number)
    for axis, placement in enumerate(grad.placements):
        if axis != layout_number and private.shard_dim(placement) == dim:
            return even_interval(local_size, mesh.size(axis), mesh.get_local_rank(axis))[0]
    return 0


def _total_norm(gradients: _LocalGradients, norm_type: float, stages: Group | None) -> torch.Tensor:
    """The norm of all gradients, on the device of the first of them."""
    several = len({local.device for local in gradients.locals}) > 1
    device = gradients.locals[0].device if several else None
    largest = norm_type == torch.inf
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    sums = list(_sums(gradients, norm_type, device)) if gradients.locals else []
    if stages is not None:  # a stage without gradients takes part too
        zero = sums[0].new_zeros(()) if sums else torch.zeros((), device=stages.device)
        sums = [torch.stack([zero, *sums]).max() if largest else torch.stack([zero, *sums]).sum()]
        sums[0] = sums[0].double()  # stages may differ in dtype
        stages.all_reduce(sums[0], op)
    total = sums[0] if len(sums) == 1 else torch.stack(sums)
    return total.max() if largest else total.sum().pow_(1.0 / norm_type)


def _sums(gradients: _LocalGradients, norm_type: float, device: torch.device | None) -> Iterator[torch.Tensor]:
    """For each set of groups, the sum of powers (or the maximum) over its ranks."""
    largest = norm_type == torch.inf
    counts = [len(part.chunks) for part in gradients.by_groups.values()]
    each = torch._foreach_norm([chunk for part in gradients.by_groups.values() for chunk in part.chunks], norm_type)
    norms = torch.stack(each if device is None else [norm.to(device) for norm in each])
    norms = norms if norms.dtype == torch.float64 else norms.float()  # squares overflow half precision
    # a maximum over ranks may drop a NaN, but not an infinity
    norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf) if largest else norms.pow_(norm_type)
    for (groups, part), values in zip(gradients.by_groups.items(), norms.split(counts), strict=True):
        total = values.max() if largest else part.apply_weights(values).sum()
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        yield total


# -- gradient groups -------------------------------------------------------------------------------------------------
# The process groups over which a gradient is sharded, found once for each parameter.


Groups = tuple[dist.ProcessGroup, ...]

_BY_SPEC: dict[int, tuple[weakref.ref[Any], Groups]] = {}
"""By id of a DTensor's spec, which all gradients of a parameter share: comparing placements takes ten times as long."""


def sharding_groups(grad: DTensor) -> Groups:
    """The groups of the axes that shard a gradient."""
    spec = private.spec_of(grad)
    known = _BY_SPEC.get(id(spec))
    if known is not None and known[0]() is spec:
        return known[1]
    mesh = spec.mesh
    groups = tuple(
        first_alike(mesh.get_group(axis))
        for axis, placement in enumerate(spec.placements)
        if private.shard_dim(placement) is not None and mesh.size(axis) > 1
    )
    number = id(spec)
    _BY_SPEC[number] = weakref.ref(spec, lambda _: _BY_SPEC.pop(number, None)), groups
    return groups


# -- stock clip ------------------------------------------------------------------------------------------------------
# `torch.nn.utils.clip_grad_norm_` on any mesh: the norm of the unsharded model. On a pipeline PyTorch's function sees
# the gradients of one stage. By its own norm every stage would be scaled by another factor, in silence. Of tensors of
# several meshes it has none.


_STAGED: TensorTable[bool] = TensorTable()  # what is clipped with all stages


def serve_stock_clip(parameters: Iterable[Any]) -> None:
    """Let PyTorch's clipping of any of these parameters take the norm that `clip_grad_norm_` of this package takes.

    Args:
        parameters: of one pipeline stage, marked with it. Every stage must then clip, as it must step.
    """
    serve_several_meshes()
    for parameter in parameters:
        _STAGED[parameter] = True


def serve_several_meshes() -> None:
    """Let PyTorch's clipping and optimizers take tensors of several meshes."""
    divide_lists_by_mesh()
    private.wrap_in_torch("norm", _wrapped)


def _wrapped(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    norm_of_rank = over_meshes(stock)

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parameters = _parameters_of(gradients)
        if not gradients:  # as of a stage that trains nothing: the others wait for its part of the norm
            parameters = [p for p in private.clipped_parameters() if _STAGED.get(p)]
        if not parameters:
            return norm_of_rank(gradients, norm_type, error_if_nonfinite, foreach)
        return norm_of(parameters, norm_type, error_if_nonfinite)

    return total_norm


def _parameters_of(gradients: list[torch.Tensor]) -> list[Any]:
    """The parameters with these gradients; none where no gradient is of a pipeline stage."""
    by_gradient = {id(parameter.grad): parameter for parameter in _STAGED.tensors() if parameter.grad is not None}
    if not any(id(gradient) in by_gradient for gradient in gradients):
        return []
    return [by_gradient[id(gradient)] if id(gradient) in by_gradient else _Unmarked(gradient) for gradient in gradients]


class _Unmarked:
    """A gradient of a parameter that is no stage's."""

    def __init__(self, grad: torch.Tensor):
        self.grad = grad


# -- stock lists -----------------------------------------------------------------------------------------------------
# PyTorch's operations on lists of tensors (`foreach`, `fused`, clipping), for a model with tensors of several meshes.
# A plan of some layers leaves plain parameters beside DTensors, and experts are on a mesh of their own. PyTorch
# divides lists by device and dtype before it runs an operation on each, which fails for tensors of several meshes.
# Here lists are divided by mesh too.


def divide_lists_by_mesh() -> None:
    """Let PyTorch run its operations on lists of tensors, of several meshes too."""
    for what in ("optimizers", "averages", "clipping"):
        private.wrap_in_torch(f"lists of {what}", _divided)
    private.wrap_in_torch("total norm", over_meshes)


def over_meshes(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """PyTorch's total norm, also of tensors of several meshes: a plain tensor then."""

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parts = _indices_by_mesh(gradients)
        if len(parts) > 1:
            norms = [_plain(stock([gradients[i] for i in part], norm_type, False, foreach)) for part in parts]
            gradients = [norm.to(max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize)) for norm in norms]
        return stock(gradients, norm_type, error_if_nonfinite, foreach)

    return total_norm


def _plain(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _indices_by_mesh(tensors: Sequence[Any]) -> list[list[int]]:
    """The indices of the tensors of each mesh; those of plain tensors are together."""
    parts: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        parts.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(index)
    return list(parts.values())


def _divided(stock: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's division of lists, by mesh too; each list but the first has as many items, or none."""

    def divided(lists: Any, with_indices: bool = False) -> Any:
        parts = _indices_by_mesh(lists[0])
        if not parts:  # a pipeline stage that trains nothing, where another one does
            return {}
        if len(parts) < 2:
            return stock(lists, with_indices)
        groups = _ListsByMesh()
        for part in parts:
            for key, (own, indices) in stock(
                [[items[i] for i in part] if items else items for items in lists], True
            ).items():
                groups.pairs.append((key, (own, [part[i] for i in indices] if with_indices else [])))
        return groups

    return divided


class _ListsByMesh:
    """As the dictionary that PyTorch returns, with a key for each mesh: (device and dtype, (lists, indices))."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def items(self) -> list[tuple[Any, Any]]:
        """All pairs."""
        return self.pairs

    def values(self) -> Iterator[Any]:
        """(lists, indices) of all pairs."""
        return (value for _, value in self.pairs)
