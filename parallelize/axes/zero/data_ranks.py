"""The ranks that share a parameter over the data axes: which sum its gradient, and which split it.

Those of experts that are folded over data axes are along `dp_replicate` and `edp` of the folded mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.options import Options
from parallelize.plan.resolved import ParameterRow
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

    mesh: MeshView
    axes: tuple[str, ...]
    shard_axis: str
    zero: int

    @classmethod
    def of_dense(cls, mesh: MeshView, zero: int) -> DataRanks:
        return cls(mesh, mesh.spec.data_axes, mesh.spec.shard_axis, zero)

    @classmethod
    def of_experts(cls, folded: MeshView, zero: int) -> DataRanks:
        axes = tuple(axis for axis in ("dp_replicate", "edp") if folded.spec.ranks(axis) > 1)
        return cls(folded, axes, "edp", zero)

    # no cached properties: before Python 3.12 all of a class share a lock, which a rank that makes a group would hold
    # while it waits for ranks that are other threads

    @property
    def split_group(self) -> Group:
        """The ranks that split what is stored: rows of the optimizer's state."""
        return self.mesh.group(self.shard_axis) if self.zero else Group.alone()

    @property
    def gradient_groups(self) -> DataGroups:
        splits = self.zero >= 2 and self.shard_axis in self.axes
        full_axes = [axis for axis in self.axes if not (splits and axis == self.shard_axis)]
        full = (self.mesh.group(*full_axes),) if full_axes else ()
        return DataGroups(full, self.split_group if splits else None)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What `fully_shard` takes: with `dp_replicate`, sharding is hybrid."""
        mesh, replicated = self.mesh.device_mesh, "dp_replicate" in self.mesh.spec.names
        return mesh["dp_replicate", self.shard_axis] if replicated else mesh[self.shard_axis]


class DataRanksOf:
    """The data ranks of each parameter of a model. record: what `parallelize_module` did to it, or None."""

    def __init__(self, mesh: MeshView, zero: int, record: PlanRecord | None):
        self.dense = DataRanks.of_dense(mesh, zero)
        folded = record.folded if record is not None else None
        self.experts = DataRanks.of_experts(folded, zero) if folded is not None else self.dense

    def __call__(self, rows: Sequence[ParameterRow]) -> DataRanks:
        """rows: of the parameter, under any of its names; none: no plan names it."""
        return self.experts if any(row.axis == "ep" for row in rows) else self.dense


# -- partition -------------------------------------------------------------------------------------------------------
# Which gradients are reduced together. Pure arithmetic on sizes, for the reducer and for the analysis that predicts
# it.


BUCKET_BYTES = 25 * 2**20
"""The default of PyTorch's DistributedDataParallel: large enough for bandwidth, small enough to start early."""


class GradientSize(NamedTuple):
    """One gradient. Only gradients with the same `key` share a bucket. `late`: it is known only when a step ends."""

    key: Any
    bytes: int
    late: bool


def partition(gradients: Sequence[GradientSize], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Yield the indices of `gradients` by bucket, in the order in which backward fills them.

    Backward goes from the last gradient to the first; late gradients come at the end. A bucket is closed once it
    contains `bucket_bytes`.
    """
    for late in (False, True):
        open_buckets: dict[Any, list[int]] = {}
        sizes: dict[Any, int] = {}
        for index in reversed(range(len(gradients))):
            gradient = gradients[index]
            if gradient.late is not late:
                continue
            if sizes.get(gradient.key, 0) >= bucket_bytes:
                yield open_buckets.pop(gradient.key)
                sizes[gradient.key] = 0
            open_buckets.setdefault(gradient.key, []).append(index)
            sizes[gradient.key] = sizes.get(gradient.key, 0) + gradient.bytes
        yield from open_buckets.values()


# -- data options ----------------------------------------------------------------------------------------------------
# What `shard_data` needs besides the stage: of the options of a run, those of the data axes, with torch dtypes.


@dataclass(frozen=True)
class DataOptions:
    """Arguments of `shard_data`, which describes them."""

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    defer: bool = False
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True

    @classmethod
    def of(cls, options: Options, bucket_bytes: int = BUCKET_BYTES, reshard_after_forward: bool = True) -> DataOptions:
        """Those of a run. Buckets and resharding are chosen by `shard_data` alone."""
        names = options.dtype, options.reduce_dtype
        dtype, reduce_dtype = (None if name is None else getattr(torch, name) for name in names)
        return cls(dtype, reduce_dtype, options.defer, bucket_bytes, reshard_after_forward)

    @property
    def low_precision(self) -> bool:
        """Whether compute is narrower than the values that the optimizer steps."""
        return self.dtype is not None and self.dtype.itemsize < 4

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Only narrow dtypes are cast to: parameters are stored in any other."""
        sum_dtype = self.reduce_dtype or (torch.float32 if self.low_precision else None)
        return MixedPrecisionPolicy(self.dtype if self.low_precision else None, sum_dtype, cast_forward_inputs=False)
