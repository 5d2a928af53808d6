"""The ranks that share a parameter over the data axes: which sum its gradient, and which split it.

Those of experts that are folded over data axes are along `dp_replicate` and `edp` of the folded mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from parallelize.comm.groups import Group, axis_group
from parallelize.comm.meshes import mesh_spec
from parallelize.plan.rows import ParameterRow
from parallelize.state.records import PlanRecord


@dataclass(frozen=True)
class DataGroups:
    """The ranks that sum a gradient: those of `full` keep all of it; those of `shard`, of ZeRO 2, their rows of it."""

    full: tuple[Group, ...] = ()
    shard: Group | None = None


@dataclass(frozen=True)
class DataRanks:
    """The data axes of a mesh, as a parameter sees them.

    Attributes:
        mesh: that has the axes: the model's, or the folded one of its experts.
        axes: with more than one rank, over which the gradient is summed. shard_axis: of these the one that ZeRO splits.
        zero: the stage.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]
    shard_axis: str
    zero: int

    @classmethod
    def of_dense(cls, mesh: DeviceMesh, zero: int) -> DataRanks:
        spec = mesh_spec(mesh)
        return cls(mesh, spec.data_axes, spec.shard_axis, zero)

    @classmethod
    def of_experts(cls, folded: DeviceMesh, zero: int) -> DataRanks:
        spec = mesh_spec(folded)
        return cls(folded, tuple(axis for axis in ("dp_replicate", "edp") if spec.ranks(axis) > 1), "edp", zero)

    # no cached properties: before Python 3.12 all of a class share a lock, which a rank that makes a group would hold while it
    # waits for ranks that are other threads

    @property
    def split_group(self) -> Group:
        """The ranks that split what is stored: rows of the optimizer's state."""
        return Group(axis_group(self.mesh, self.shard_axis)) if self.zero else Group.alone()

    @property
    def gradient_groups(self) -> DataGroups:
        splits = self.zero >= 2 and self.shard_axis in self.axes
        full_axes = [axis for axis in self.axes if not (splits and axis == self.shard_axis)]
        full = (Group(axis_group(self.mesh, *full_axes)),) if full_axes else ()
        return DataGroups(full, self.split_group if splits else None)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What `fully_shard` takes: with `dp_replicate`, sharding is hybrid."""
        replicated = "dp_replicate" in (self.mesh.mesh_dim_names or ())
        return self.mesh["dp_replicate", self.shard_axis] if replicated else self.mesh[self.shard_axis]


class DataRanksOf:
    """The data ranks of each parameter of a model. record: what `parallelize_module` did to it, or None."""

    def __init__(self, mesh: DeviceMesh, zero: int, record: PlanRecord | None):
        self.dense = DataRanks.of_dense(mesh, zero)
        folded = record.folded if record is not None else None
        self.experts = DataRanks.of_experts(folded, zero) if folded is not None else self.dense

    def __call__(self, rows: Sequence[ParameterRow]) -> DataRanks:
        """rows: of the parameter, under any of its names; none: no plan names it."""
        return self.experts if any(row.axis == "ep" for row in rows) else self.dense
