"""Bytes of parameters, gradients and optimizer state that a rank stores, by arithmetic.

With N elements of this rank's tp and pp part, n ranks of the shard axis, b bytes per element in compute, and s bytes of
optimizer state per element (8 for Adam in float32):

| stage | parameters | gradients | optimizer |
|---|---|---|---|
| 0 | b N | b N | s N |
| 1 | b N | b N | s N / n |
| 2 | b N | b N / n | s N / n |
| 3 | b N / n | b N / n | s N / n |

Mixed precision: b is 2 for parameters (4 in stage 3, which stores float32), gradients take 4, and stages 0 to 2 add 4
for the copies that the optimizer steps. Rows are split as `torch.chunk` splits them, which rounds up.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.mesh import DATA_AXES, EXPERT_AXES
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.plan.parameter_shards import shards_of, stored_elements
from parallelize.state.records import pipeline_cut, record_of, resolution_so_far

ADAM_STATE_BYTES = 8


def bytes_per_rank(
    module: AnyModel, zero: int, mesh: DeviceMesh, *, mixed: bool = False, state_bytes: int = ADAM_STATE_BYTES
) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, of a model that was sharded so.

    Gradient buffers have one more number per parameter, and rounded-up rows.

    Args:
        module: after `shard_data`.
        zero: its stage, 0 to 3.
        mesh: the one that `shard_data` was given.
        mixed: parameters are computed with in bfloat16, and gradients and optimizer state are float32.
        state_bytes: bytes of optimizer state per element.

    Returns: {"parameters", "gradients", "optimizer"}, in bytes.
    Cost: no communication.
    """
    module = module_of(module)
    view, cut, record = MeshView.of(mesh), pipeline_cut(module), record_of(module)
    earlier = resolution_so_far(module).with_options(zero=zero)
    resolved = replace(earlier, mesh=earlier.mesh.with_axes(view.spec.only(*DATA_AXES)))
    data_rank = view.index(view.spec.shard_axis)
    tp_rank, pp_rank = record.group.rank if record is not None else 0, cut.group.rank if cut is not None else 0
    parameters = dict(module.named_parameters(remove_duplicate=False))
    totals = {"parameters": 0, "gradients": 0, "optimizer": 0}
    folded = record.folded if record is not None else None
    edp_rank, ep_rank = (folded.index(axis) if folded is not None else 0 for axis in EXPERT_AXES)
    for shard in shards_of(resolved, pp_rank, tp_rank, ep_rank):
        index = edp_rank if shard.axis == "ep" else data_rank
        elements = stored_elements([shard], zero, counts_gradients=True, data_rank=index)
        item = parameters[shard.name].element_size()
        totals["parameters"] += elements.parameters * shard.item_bytes(4 if zero == 3 else item)
        totals["gradients"] += elements.gradients * (4 if mixed else item)
        totals["optimizer"] += elements.optimizer * (state_bytes + (4 if mixed and zero < 3 else 0))
    return totals
