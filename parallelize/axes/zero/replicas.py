"""Ranks that store the same parameters begin with equal weights: otherwise each would train a model of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.zero.buckets import to_local
from parallelize.base.mesh import DATA_AXES, FOLDED_AXES
from parallelize.comm.groups import Group
from parallelize.comm.handshake import agree_on, check_replicas
from parallelize.comm.mesh_view import MeshView
from parallelize.state.records import record_of

_FIX = "seed all ranks alike before the model is built, or load the same weights; check_replicated=False accepts them"


def compare_weights(
    module: nn.Module,
    mesh: MeshView,
    group: Group,
    axes: str,
    names: Iterable[str] | None = None,
    *,
    buffers: bool = True,
) -> None:
    """Compare what the ranks of a group store of parameters and buffers that must be equal. Call it on every rank of
    the mesh.

    Args:
        module: the model. What is on meta is left out.
        mesh: the mesh of the model. A difference is raised on all of its ranks.
        group: the ranks that are compared; alone: this rank waits for the others' result.
        axes: the axes of the group, for the message.
        names: of the parameters that are compared. Default: all.
        buffers: whether the buffers are compared too, which a forward reads as it does parameters (rotary tables).

    Raises: HandshakeError `replicas-differ`, or `ranks-disagree` on the ranks whose own group is equal.
    Cost: a handshake, a read of the parameters and buffers, and an all-gather of 40 bytes.
    """
    parameters = dict(module.named_parameters(remove_duplicate=names is None))
    stored = {name: to_local(parameters[name]) for name in (parameters if names is None else names)}
    if buffers:
        stored |= {name: to_local(buffer) for name, buffer in module.named_buffers() if buffer.numel()}
    with agree_on(mesh):
        check_replicas(group, stored, "parameters or buffers" if buffers else "parameters", axes, _FIX)


def compare_data_ranks(
    module: nn.Module,
    mesh: MeshView,
    names: Iterable[str] | None = None,
    *,
    axes: Sequence[str] = DATA_AXES,
    compares: bool = True,
) -> None:
    """`compare_weights` over the given axes, as far as the mesh has them. Folded experts are compared over their
    copies, without buffers, which may be shards of them (codes of quantized experts).

    compares: False on ranks whose values are about to be replaced; the same on all ranks along `axes`.
    """
    record = record_of(module)
    if record is None or record.folded is None:
        _compare_over(module, mesh, axes, names, compares)
        return
    experts = {name for row in record.resolved.parameters.values() if row.axis == "ep" for name in row.fact.names}
    present = list(dict(module.named_parameters()) if names is None else names)
    _compare_over(module, mesh, axes, [name for name in present if name not in experts], compares, buffers=False)
    shards = mesh.spec.shard_axis
    of_copies = [axis for axis in ("dp_replicate", "edp") if ("dp_replicate" if axis != "edp" else shards) in axes]
    of_experts = [name for name in present if name in experts]
    _compare_over(module, record.folded, of_copies, of_experts, compares, buffers=False)


def _compare_over(
    module: nn.Module,
    mesh: MeshView,
    axes: Sequence[str],
    names: Iterable[str] | None,
    compares: bool,
    *,
    buffers: bool = True,
) -> None:
    present = [axis for axis in mesh.spec.names if axis in axes and mesh.spec.size(axis) > 1]
    if present:
        group = mesh.group(*present) if compares else Group.alone()
        compare_weights(module, mesh, group, " and ".join(present), names, buffers=buffers)


# -- sketches --------------------------------------------------------------------------------------------------------
# Sketches of replicated parameters: a few numbers, by which ranks compare values that are equal up to rounding. The
# gradient of a parameter that every rank of `tp` stores is computed by each of them from the same activations. On an
# accelerator such kernels may add in another order (atomics), so replicas drift by rounding, and bits cannot be
# compared. A sketch is linear: that of a difference is the difference of the sketches, and its norm is in expectation
# that of the difference. Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (count
# sketch), with fixed signs and buckets.


T = torch.Tensor

BUCKETS = 16
_BLOCK = 1 << 17
"""Elements that are multiplied at once."""
_FACTOR = 0x1E3779B97F4A7C15
_FOR_NAN = 1e30


def is_replicated(parameter: nn.Parameter, axis: str) -> bool:
    """Whether all ranks along an axis of the mesh store the same elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or (axis,)
    if "ep" in names and axis in FOLDED_AXES:  # folded over these ranks, of which some have copies
        return False
    return axis not in names or parameter.placements[names.index(axis)].is_replicate()


def replicated_over(module: nn.Module, axis: str) -> dict[str, T]:
    """The local tensor of each parameter that all ranks along an axis store, by name."""
    stored = {name: to_local(p) for name, p in module.named_parameters() if is_replicated(p, axis)}
    return {name: local.detach() for name, local in stored.items() if local.numel() and not local.is_meta}


def sketches(tensors: Mapping[str, T]) -> T:
    """[tensors, BUCKETS + 1] float64: of each tensor the sums of its elements, with fixed signs, by bucket; and its
    norm."""
    return torch.stack([_sketch(tensor) for tensor in tensors.values()])


def apart(by_rank: T, tensors: Mapping[str, T]) -> T:
    """Which tensors of which ranks are farther from those of the first rank than rounding explains.

    Args:
        by_rank: [ranks, tensors, BUCKETS + 1], what each rank has sketched.
        tensors: of this rank, whose dtypes count: the distance may be the square root of the dtype's epsilon, times the
            norm.

    Returns: [ranks, tensors], bool.
    """
    sums, norms = by_rank[..., :BUCKETS], by_rank[..., BUCKETS]
    tolerances = torch.tensor([tolerance_of(tensor.dtype) for tensor in tensors.values()], dtype=torch.float64)
    distances = torch.linalg.vector_norm(sums - sums[:1], dim=-1)
    return ~(distances <= tolerances.to(by_rank.device) * norms.amax(0))


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative distance of replicas with this dtype; 0 for integers, which are not rounded."""
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point else 0.0


def _sketch(tensor: T) -> T:
    flat = tensor.reshape(-1)
    values = flat.to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
    sums = values.new_zeros(BUCKETS)
    for start in range(0, values.numel(), _BLOCK):  # in blocks, because signs and products need memory too
        block = values[start : start + _BLOCK]
        products = block * _signs(start, block)
        sums = sums + F.pad(products, (0, -len(block) % BUCKETS)).view(-1, BUCKETS).sum(0)
    norm = torch.linalg.vector_norm(values)
    return torch.cat([torch.nan_to_num(sums, nan=_FOR_NAN), torch.nan_to_num(norm, nan=0.0)[None]]).double()


def _signs(start: int, block: T) -> T:
    """1 or -1 for each element, by its index in the tensor: mixed bits of the index's product with an odd number."""
    products = torch.arange(start, start + len(block), device=block.device) * _FACTOR
    return (((products ^ (products >> 29)) >> 40) & 1).to(block.dtype) * 2 - 1
