"""What a step of Muon sends and stores: shards of matrices to the ranks that orthogonalize them, and updates back. Arithmetic.

Which parameters are matrices, and which rank computes each, is decided by `optimizers/`, from the boxes that each rank of a pipeline
stage stores; here those are the boxes of the resolved plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallelize.base.files.boxes import Box, box_of
from parallelize.base.layout import even_interval, part_inside
from parallelize.base.mesh import MeshSpec, folded_coordinates
from parallelize.plan.parameter_shards import ParameterShard, expert_zero_dim
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.state.optimizers.matrices import matrices_of, matrix_names
from parallelize.state.optimizers.matrix_exchange import OwnedMatrix, assign_owners, exchanged_elements
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.trace_data import Message

OPTIMIZER = "muon"
MOMENTUM_BYTES = 4
"""Of state for each element of a matrix, in float32; other elements are stepped by AdamW."""
_ITERATIONS = 5  # of the orthogonalization, by default
_SENT_BYTES = 2  # bfloat16
_FLAG_BYTES = 4  # int32, for each parameter: whether any rank has its gradient


@dataclass(frozen=True)
class MatrixSteps:
    """The part of a rank's step that Muon's matrices are.

    Attributes:
        names: of the parameters that are matrices. messages: in the order in which they are sent.
        buffer_bytes: of updates before they are sent, what is sent and received, and the full matrices of this rank.
    """

    names: frozenset[str] = frozenset()
    messages: tuple[Message, ...] = ()
    buffer_bytes: int = 0


def matrix_steps(root: Any, resolved: ResolvedPlan, setting: Setting, shards: Sequence[ParameterShard]) -> MatrixSteps:
    """Of the first rank of a pipeline stage; nothing where another optimizer steps.

    Args:
        root: the model, on any device. shards: the parameters of that rank.
    """
    if setting.optimizer != OPTIMIZER:
        return MatrixSteps()
    trained = {shard.name: shard for shard in shards if shard.trained}
    names = matrix_parameters(root, resolved, setting, shards)
    rows = {name: resolved.parameters[resolved.facts.owners[name]] for name in names}
    axes = [axis for axis in setting.mesh.names if axis != "pp"]
    ranks = [setting.mesh.coordinates(rank) for rank in setting.mesh.group_of(0, *axes)] if axes else [{}]
    stored = [dict(_boxes(rows, setting, rank)) for rank in ranks]
    units = [(name, box) for name in sorted(names) for box in matrices_of(root, name, rows[name].fact.shape, {})]
    matrices = assign_owners(units, stored, _ITERATIONS)
    local = sum(trained[name].local_numel(trained[name].splits.optimizer) for name in names)
    return MatrixSteps(names, *_exchange(matrices, len(ranks), len(names), local, setting))


def depends_on(resolved: ResolvedPlan, setting: Setting, shards: Sequence[ParameterShard]) -> Hashable:
    """What `matrix_steps` of one model depends on; a constant where another optimizer steps."""
    if setting.optimizer != OPTIMIZER:
        return ()
    rows = ((shard, resolved.parameters[resolved.facts.owners[shard.name]]) for shard in shards if shard.trained)
    stored = tuple((shard.name, shard.splits.optimizer, row.axis, row.layout) for shard, row in rows)
    return stored, setting.mesh, setting.expert_ranks, bool(setting.zero), setting.zero == 3, setting.gradient_bytes


def matrix_parameters(
    root: Any, resolved: ResolvedPlan, setting: Setting, shards: Sequence[ParameterShard]
) -> frozenset[str]:
    """Names of the parameters that Muon steps as matrices; none where another optimizer steps."""
    if setting.optimizer != OPTIMIZER:
        return frozenset()
    trained = [shard.name for shard in shards if shard.trained]
    facts = resolved.facts
    return frozenset(matrix_names(root, {name: facts.parameters[facts.owners[name]].shape for name in trained}))


def _exchange(
    matrices: list[OwnedMatrix], size: int, num_parameters: int, local_elements: int, setting: Setting
) -> tuple[tuple[Message, ...], int]:
    owned = sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices if matrix.owner == 0)
    both_ways = [exchanged_elements(matrices, 0, size, to_owner=to_owner) for to_owner in (True, False)]
    staged = max(sum(sent) + sum(received) for sent, received in both_ways)
    buffers = local_elements * setting.gradient_bytes + (staged + 2 * owned) * _SENT_BYTES
    if size == 1 or not matrices:
        return (), buffers if matrices else 0
    axis = setting.group_name([name for name in setting.mesh.names if name != "pp"])
    flags = Message("all_reduce", axis, size, num_parameters * _FLAG_BYTES, "gradients of matrices", "step")
    exchanges = []
    for (sent, received), module in zip(both_ways, ("matrices to their owners", "updates of matrices"), strict=True):
        remote, arriving = (sum(counts[1:]) * _SENT_BYTES for counts in (sent, received))
        message = Message("all_to_all", axis, size, sum(sent) * _SENT_BYTES, module, "step", arriving, remote)
        exchanges.append(message)
    return (flags, *exchanges), buffers


def _boxes(
    rows: Mapping[str, ParameterRow], setting: Setting, coordinates: Mapping[str, int]
) -> Iterator[tuple[str, list[Box]]]:
    """(name, boxes of the full parameter) of what an optimizer steps on the rank at these coordinates."""
    experts: Mapping[str, int] = {}
    if setting.folds:
        experts = folded_coordinates(
            setting.mesh, setting.expert_ranks, {**dict.fromkeys(setting.mesh.names, 0), **coordinates}
        )
    for name, row in rows.items():
        where, mesh, zero_axis = coordinates, setting.mesh, setting.shard_axis
        if row.axis == "ep":
            where, mesh, zero_axis = experts, setting.mesh_of("ep"), "edp"
        yield name, list(_boxes_of(row, where, setting.zero, mesh, zero_axis))


def _boxes_of(
    row: ParameterRow, coordinates: Mapping[str, int], zero: int, mesh: MeshSpec, zero_axis: str
) -> Iterator[Box]:
    layout, rank, ranks = row.layout, coordinates.get(row.axis, 0), mesh.ranks(zero_axis) if zero else 1
    window = [(0, size) for size in layout.stored_local_shape(rank)]
    dim = expert_zero_dim(layout, ranks) if row.axis == "ep" and zero == 3 else 0
    window[dim] = even_interval(window[dim][1], ranks, coordinates.get(zero_axis, 0) if ranks > 1 else 0)
    for pair in layout.slices(rank):
        part = part_inside(pair, window)
        if part is not None:
            yield box_of(part.full)
