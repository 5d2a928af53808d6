"""The placement that a `LayoutDTensor` shows: the intervals of a layout.

PyTorch rebuilds a `_StridedShard` from its dim and split factor where it distributes a tensor, so that
`distribute_tensor(full, p.device_mesh, p.placements)` makes shards of its own, which `p.copy_()` and all operations convert. What
computes one offset for each rank from a placement (PyTorch's `DTensor.from_local` after slicing, `zeros(placements=)`) has no
answer here.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.layout import Layout
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.state.layout_tensor.stored_order import store


class LayoutShard(private.StridedShard):
    """Dim `layout.dim` is sharded by the intervals of a layout, of which a rank may store several.

    Args:
        layout: of the full tensor over the ranks of tp.
    """

    def __init__(self, layout: Layout):
        assert layout.dim is not None
        # `distribute_tensor` needs a factor that divides evenly; of 1, PyTorch makes a plain `Shard`
        super().__init__(layout.dim, split_factor=max(2, layout.shape[layout.dim] // layout.num_ranks))
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutShard) and self.layout == other.layout

    def __hash__(self) -> int:
        return hash(self.layout)

    def __repr__(self) -> str:
        return f"LayoutShard(dim={self.dim}, {len(self.layout.chunks)} chunks over {self.layout.num_ranks} ranks)"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return LayoutShard, (self.layout,)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Any
    ) -> torch.Tensor:
        """The full tensor in its original order. Called by PyTorch's `redistribute`."""
        layout = self.layout
        if local_tensor.shape[self.dim] != layout.stored_local_size:
            self._refuse()
        full = local_tensor.new_empty(layout.shape)
        for rank, shard in enumerate(Group(mesh.get_group(mesh_dim)).all_gather(local_tensor.contiguous())):
            for pair in layout.slices(rank):
                full[pair.full] = shard[pair.local]
        return full

    def _replicate_to_strided_shard(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        """This rank's shard. Called by PyTorch's `redistribute`."""
        return store(local_tensor, self.layout, int(shard_index))

    def _local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    local_shard_size_and_offset: Any = _local_shard_size_and_offset

    def _refuse(self) -> NoReturn:
        """Raises: ShapeError `several-intervals`."""
        what = f"a rank stores several intervals of dim {self.dim} of a {list(self.layout.shape)} parameter, not one"
        raise ShapeError(
            Problem(
                "several-intervals",
                f"{what}: a size and an offset do not describe its shard",
                fix="read it with `full_tensor()`; write it with `copy_`, `load_state_dict`, torch.distributed.checkpoint "
                "or `load_checkpoint`",
            )
        )
