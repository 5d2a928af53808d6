"""Ranks that store the same parameters begin with equal weights: otherwise each would train a model of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.zero.buckets import to_local
from parallelize.base.mesh import DATA_AXES
from parallelize.comm.groups import Group, axis_group
from parallelize.comm.handshake import agree_on, check_replicas
from parallelize.comm.meshes import mesh_spec
from parallelize.state.records import record_of

_FIX = "seed all ranks alike before the model is built, or load the same weights; check_replicated=False accepts them"


def data_group(mesh: DeviceMesh) -> Group:
    """The ranks along all data axes of a mesh, over which gradients are summed."""
    axes = mesh_spec(mesh).data_axes
    return Group(axis_group(mesh, *axes)) if axes else Group.alone()


def compare_weights(
    module: nn.Module, mesh: DeviceMesh, group: Group, axes: str, names: Iterable[str] | None = None
) -> None:
    """Compare what the ranks of a group store of parameters that must be equal. Call it on every rank of the mesh.

    Args:
        module: the model. Parameters on meta are left out.
        mesh: the mesh of the model, on all ranks of which a difference is raised.
        group: the ranks that are compared; alone: this rank waits for the others' result.
        axes: the axes of the group, for the message.
        names: of the parameters that are compared. Default: all.

    Raises: HandshakeError `replicas-differ`, or `ranks-disagree` on the ranks whose own group is equal.
    Cost: a handshake, a read of the parameters, and an all-gather of 40 bytes.
    """
    parameters = dict(module.named_parameters(remove_duplicate=names is None))
    stored = {name: to_local(parameters[name]) for name in (parameters if names is None else names)}
    with agree_on(mesh):
        check_replicas(group, stored, "parameters", axes, _FIX)


def compare_data_ranks(
    module: nn.Module,
    mesh: DeviceMesh,
    names: Iterable[str] | None = None,
    *,
    axes: Sequence[str] = DATA_AXES,
    compares: bool = True,
) -> None:
    """`compare_weights` over the given axes, as far as the mesh has them. Folded experts are compared over their copies.

    compares: False on ranks whose values are about to be replaced; the same on all ranks along `axes`.
    """
    record = record_of(module)
    if record is None or record.folded is None:
        _compare_over(module, mesh, axes, names, compares)
        return
    experts = {name for row in record.resolved.parameters.values() if row.axis == "ep" for name in row.fact.names}
    present = list(dict(module.named_parameters()) if names is None else names)
    _compare_over(module, mesh, axes, [name for name in present if name not in experts], compares)
    shards = mesh_spec(mesh).shard_axis
    of_copies = [axis for axis in ("dp_replicate", "edp") if ("dp_replicate" if axis != "edp" else shards) in axes]
    _compare_over(module, record.folded, of_copies, [name for name in present if name in experts], compares)


def _compare_over(
    module: nn.Module, mesh: DeviceMesh, axes: Sequence[str], names: Iterable[str] | None, compares: bool
) -> None:
    spec = mesh_spec(mesh)
    present = [axis for axis in spec.names if axis in axes and spec.size(axis) > 1]
    if present:
        group = Group(axis_group(mesh, *present)) if compares else Group.alone()
        compare_weights(module, mesh, group, " and ".join(present), names)
