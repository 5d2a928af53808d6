"""A mesh as one of its ranks sees it: made once, where a `DeviceMesh` enters the package, and handed down."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.mesh import SAMPLE_AXES, MeshSpec, folded, folding_order
from parallelize.comm.groups import Group, axis_group
from parallelize.comm.meshes import mesh_spec, tp_mesh


class MeshView:
    """A mesh with its sizes, and this rank's place and groups in it.

    Args:
        device_mesh: any `DeviceMesh` that has this rank.

    Attributes:
        device_mesh: what DTensors and `fully_shard` take.
        spec: the names and sizes of its axes; those of a mesh without names are as `mesh_spec` names them.

    Raises: MeshError, as `mesh_spec`.
    """

    __slots__ = ("device_mesh", "spec")

    def __init__(self, device_mesh: DeviceMesh):
        self.device_mesh = device_mesh
        self.spec: MeshSpec = mesh_spec(device_mesh)

    @classmethod
    def of(cls, mesh: DeviceMesh | MeshView) -> MeshView:
        """The view of what a public function was given; one that was made already is handed down."""
        return mesh if isinstance(mesh, MeshView) else cls(mesh)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.spec.world_size

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in the order of the mesh."""
        return self.device_mesh.mesh.flatten().tolist()

    @property
    def position(self) -> int:
        """The index of this rank in `ranks`."""
        return self.ranks.index(dist.get_rank()) if self.size > 1 else 0

    @property
    def device_type(self) -> str:
        """ "cpu", or the type of the accelerator."""
        return self.device_mesh.device_type

    def index(self, axis: str) -> int:
        """This rank's index along an axis; 0 where the mesh has no such axis."""
        return self.device_mesh.get_local_rank(self.spec.names.index(axis)) if self.spec.ranks(axis) > 1 else 0

    @property
    def has_groups(self) -> bool:
        """Whether the process groups of its axes still exist."""
        try:
            self.place(*self.spec.names)
        except RuntimeError:  # of torch, which finds no group of this name
            return False
        return True

    @property
    def coordinates(self) -> dict[str, int]:
        """Axis name -> index of this rank along that axis."""
        return self.spec.coordinates(self.position)

    def place(self, *axes: str) -> tuple[int, int]:
        """(index, number) of this rank over the product of those of the axes that the mesh has, the last fastest."""
        index = 0
        for axis in axes:
            index = index * self.spec.ranks(axis) + self.index(axis)
        return index, self.spec.ranks(*axes)

    @property
    def sample_place(self) -> tuple[int, int]:
        """(index, number) of this rank among those that get different samples."""
        return self.place(*SAMPLE_AXES)

    def group(self, *axes: str) -> Group:
        """This rank's group along those of the axes that the mesh has, in their order; alone where it has none of them.

        Call it on every rank of the mesh. Cost: at most the creation of one process group.
        """
        present = [axis for axis in axes if axis in self.spec.names]
        return Group(axis_group(self.device_mesh, *present)) if present else Group.alone()

    @property
    def data_group(self) -> Group:
        """The ranks along all data axes, over which gradients are summed."""
        return self.group(*self.spec.data_axes)

    @property
    def world(self) -> Group:
        """All ranks of the mesh."""
        return self.group(*self.spec.names)

    @property
    def tp(self) -> DeviceMesh:
        """The submesh of tensor parallelism. Raises: MeshError `no-tp-axis`."""
        return tp_mesh(self.device_mesh)

    def with_tp(self) -> MeshView:
        """The same mesh with an axis tp of one rank, where it has none. Call it on every rank of the mesh."""
        if "tp" in self.spec.names:
            return self
        ranks = self.device_mesh.mesh.unsqueeze(-1)
        return MeshView(DeviceMesh(self.device_type, ranks, mesh_dim_names=(*self.spec.names, "tp")))

    def folded(self, expert_ranks: int) -> MeshView:
        """The same ranks as experts see them, with the axes edp and ep in the place of dp, cp and tp: see
        `base.mesh.folded`.

        Call it on every rank of the mesh. Cost: the creation of process groups.
        """
        order = [self.spec.names.index(name) for name in folding_order(self.spec)]
        expert_spec = folded(self.spec, expert_ranks)
        ranks = self.device_mesh.mesh.permute(order).reshape(expert_spec.sizes)
        return MeshView(DeviceMesh(self.device_type, ranks, mesh_dim_names=expert_spec.names))

    def axes_along(self, ranks: Collection[int]) -> tuple[str, ...]:
        """The fewest axes along which these global ranks are a group of the mesh; none where they are no such group."""
        flat = self.ranks
        if not ranks or not set(ranks) <= set(flat):
            return ()
        position, wanted = flat.index(next(iter(ranks))), sorted(ranks)
        wide = [name for name, size in self.spec.axes if size > 1]
        for axes in chain.from_iterable(combinations(wide, count) for count in range(1, len(wide) + 1)):
            if sorted(flat[index] for index in self.spec.group_of(position, *axes)) == wanted:
                return axes
        return ()

    def __repr__(self) -> str:
        return f"MeshView({self.spec})"


AnyMesh = DeviceMesh | MeshView
"""What a function takes that users call with their mesh, and this package with its view of it."""
