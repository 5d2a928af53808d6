"""What a step sends over the data axes: gradients, and parameters that another rank has stepped. Arithmetic.

The buckets are those of `axes/zero/reducer.py` (one function partitions both). The gathers after a step are those of
`axes/zero/optimizer_shards.py`. Stage 3 is `fully_shard`: two gathers and a reduction per FSDP unit and microbatch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallelize.axes.zero.data_ranks import GradientSize, partition
from parallelize.axes.zero.optimizer_shards import GATHER_BYTES
from parallelize.base.boxes import Box, full_box, shape_of, volume
from parallelize.base.layout import even_interval
from parallelize.base.mesh import MeshSpec, folded, folded_coordinates
from parallelize.plan.parameter_shards import ParameterShard, expert_zero_dim, zero_groups
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.state.optimizers.matrices import cost_of_matrix, matrices_of, matrix_names, matrix_shape_of
from parallelize.state.optimizers.owners import assign_owners, exchanged_elements, is_everywhere
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.trace_data import Message


@dataclass(frozen=True)
class DataView:
    """The data axes as a parameter sees them: those of the mesh, or for folded experts those of the mesh of experts.

    Attributes:
        axes: with more than one rank, over which gradients are summed. shard_axis: of these the one that ZeRO splits;
            "dp*cp" where it splits over both.
    """

    setting: Setting
    mesh: MeshSpec
    axes: tuple[str, ...]
    shard_axis: str

    @property
    def ranks(self) -> int:
        """The ranks that split what ZeRO splits."""
        return self.ranks_of([self.shard_axis])

    def ranks_of(self, axes: Sequence[str]) -> int:
        """Of a group along axes."""
        return self.mesh.ranks(*(part for axis in axes for part in axis.split("*")))

    @property
    def splits_gradients(self) -> bool:
        """Whether each data rank keeps only its part of the gradients, apart from scalars."""
        return self.setting.zero >= 2 and self.ranks > 1

    @property
    def scatters(self) -> bool:
        """Whether gradients of ZeRO 1 are reduce-scattered when a step ends."""
        return self.setting.zero == 1 and self.ranks > 1 and self.setting.training_system.scatters

    def name(self, axes: Sequence[str]) -> str:
        parts = [part for axis in axes for part in axis.split("*")]
        return self.setting.group_name(parts) if self.mesh == self.setting.mesh else "*".join(axes)


def view_of(shard: ParameterShard, setting: Setting) -> DataView:
    """The data axes of a parameter."""
    if shard.axis == "ep":
        mesh = folded(setting.mesh, setting.expert_ranks)
        return DataView(setting, mesh, tuple(axis for axis in ("dp_replicate", "edp") if mesh.ranks(axis) > 1), "edp")
    joined = [axis for axis in setting.zero_axes if setting.size(axis) > 1]
    if len(joined) < 2:
        return DataView(setting, setting.mesh, setting.data_axes, joined[0] if joined else setting.shard_axis)
    others = (axis for axis in setting.data_axes if axis not in joined)
    return DataView(setting, setting.mesh, (*others, "*".join(joined)), "*".join(joined))


def buckets_of(shards: Sequence[ParameterShard], setting: Setting) -> list[list[ParameterShard]]:
    """Trained parameters by the bucket in which their gradients are reduced, in order."""
    trained = [shard for shard in shards if shard.trained]
    splits = setting.splits_gradients
    split_axes = {
        axis: view_of(shard, setting).splits_gradients for axis, shard in {s.axis: s for s in trained}.items()
    }
    sizes = [
        GradientSize(
            (shard.stage, not shard.shape, shard.axis),
            shard.numel * setting.gradient_bytes,
            shard.late or (splits and not (shard.shape and split_axes[shard.axis])),
        )
        for shard in trained
    ]
    return [[trained[index] for index in indices] for indices in partition(sizes)]


def _is_late(shard: ParameterShard, setting: Setting) -> bool:
    """Whether the gradient is reduced when the step ends."""
    is_split = bool(shard.shape) and view_of(shard, setting).splits_gradients
    return shard.late or (setting.splits_gradients and not is_split)


def data_messages(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[tuple[Message, int]]:
    """(message, how often a step sends it) of this rank over its data axes, except for the loss and the token count."""
    if not setting.data_axes:
        return
    if setting.zero == 3:
        yield from _fsdp_messages(shards, setting)
        return
    for bucket in buckets_of(shards, setting):
        view = view_of(bucket[0], setting)
        once = _is_late(bucket[0], setting) or setting.defer or not setting.splits_gradients
        scatters = (view.splits_gradients or view.scatters) and bool(bucket[0].shape)
        messages = _reduce_scatter(bucket, view) if scatters else _all_reduce(bucket, view)
        for message in messages:
            yield message, 1 if once else setting.step_microbatches
    if setting.zero in (1, 2):
        for axis in ("tp", "ep"):
            yield from ((message, 1) for message in _gathers([s for s in shards if s.axis == axis], setting))


def _bucket_name(bucket: Sequence[ParameterShard]) -> str:
    return bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} and {len(bucket) - 1} more"


def _all_reduce(bucket: Sequence[ParameterShard], view: DataView) -> Iterator[Message]:
    """One all-reduce. Scalars under ZeRO 2 are reduced over the other axes first, then over the shard axis.

    Each gradient is sent with one number, which counts the ranks that have it.
    """
    size = (sum(shard.numel for shard in bucket) + len(bucket)) * view.setting.reduced_bytes
    splits = view.splits_gradients
    axes = [axis for axis in view.axes if not (splits and axis == view.shard_axis)]
    for group in ([axes] if axes else []) + ([[view.shard_axis]] if splits else []):
        yield Message("all_reduce", view.name(group), view.ranks_of(group), size, _bucket_name(bucket), "backward")


def _reduce_scatter(bucket: Sequence[ParameterShard], view: DataView) -> Iterator[Message]:
    axis, ranks, setting = view.shard_axis, view.ranks, view.setting
    local = (sum(shard.padded_numel(ranks) for shard in bucket) + len(bucket)) * setting.reduced_bytes
    op = "all_to_all" if setting.transport == "gloo" else "reduce_scatter"
    yield Message(op, axis, ranks, ranks * local, _bucket_name(bucket), "backward")
    other_axes = [name for name in view.axes if name != axis]
    if other_axes:
        name, size = view.name(other_axes), view.ranks_of(other_axes)
        yield Message("all_reduce", name, size, local, _bucket_name(bucket), "backward")


def _gathers(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[Message]:
    """After a step, every rank gets the parameters back: large ones one by one, the others together."""
    if not shards or (view := view_of(shards[0], setting)).ranks == 1:
        return
    axis, ranks, item = view.shard_axis, view.ranks, setting.compute_bytes
    trained = [shard for shard in shards if shard.trained and shard.shape]
    if setting.training_system.by_owner:  # around the ring of all ranks, as a gather of as many bytes
        owners = min(ranks, len(trained))
        size = sum(shard.numel for shard in trained) * item // owners
        yield from (Message("all_gather", axis, ranks, size, f"parameters of owner {n}", "step") for n in range(owners))
        return
    small_bytes, num_small = 0, 0
    for shard in trained:
        if _is_gathered_alone(shard, ranks, item):
            yield Message("all_gather", axis, ranks, shard.numel * item, shard.name, "step")
        else:
            small_bytes, num_small = small_bytes + shard.padded_numel(ranks) * item, num_small + 1
    if num_small:
        yield Message("all_gather", axis, ranks, ranks * small_bytes, f"{num_small} small parameters", "step")


def _is_gathered_alone(shard: ParameterShard, ranks: int, item: int) -> bool:
    return shard.rows % ranks == 0 and shard.numel * item >= GATHER_BYTES


def gathered_after_step(shards: Sequence[ParameterShard], setting: Setting) -> int:
    """Bytes of the buffers in which small parameters are gathered after a step of ZeRO 1 and 2: what a rank sends, and
    what all of them have sent."""
    small = 0
    for shard in shards if setting.zero in (1, 2) else ():
        ranks = view_of(shard, setting).ranks
        if shard.trained and shard.shape and ranks > 1 and not _is_gathered_alone(shard, ranks, setting.compute_bytes):
            small += shard.padded_numel(ranks) * setting.compute_bytes * (1 + ranks)
    return small


def _fsdp_messages(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[tuple[Message, int]]:
    times = setting.step_microbatches
    reductions = 1 if setting.defer else times
    for unit, group in zero_groups(shards).items():
        view = view_of(group[0], setting)
        axis, ranks = view.shard_axis, view.ranks
        gathered = sum(shard.padded_numel(ranks) * shard.item_bytes(setting.compute_bytes) for shard in group)
        trained = sum(shard.padded_numel(ranks) for shard in group if shard.trained)
        if ranks > 1:
            full_bytes = ranks * gathered
            yield Message("all_gather", axis, ranks, full_bytes, unit, "forward"), times
            yield Message("all_gather", axis, ranks, full_bytes, unit, "backward"), times
        reduced = trained * setting.reduced_bytes
        if ranks > 1 and trained:
            yield Message("reduce_scatter", axis, ranks, ranks * reduced, unit, "backward"), reductions
        for other in (axis for axis in view.axes if axis != view.shard_axis):
            if trained:
                yield Message("all_reduce", other, view.ranks_of([other]), reduced, unit, "backward"), reductions
    everyone = setting.group_name(setting.data_axes)
    flags = Message(
        "all_reduce", everyone, setting.size(*setting.data_axes), len(shards), "used parameters", "backward"
    )
    yield flags, reductions  # one byte for each parameter; see `axes/zero/unused_parameters.py`


# -- owner steps -----------------------------------------------------------------------------------------------------
# What a step sends and stores where one rank, the owner, computes with what others have shards of: Muon's matrices, and
# parameters of an optimizer that steps each in full. Arithmetic. Who owns what is decided by `state/optimizers/`, from
# the boxes that each rank of a pipeline stage stores; here those are the boxes of the resolved plan.


MUON = "muon"
IN_FULL = ("adafactor",)
MOMENTUM_BYTES = 4
"""Of state for each element of a matrix, in float32; other elements are stepped by AdamW."""
_ITERATIONS = 5  # of the orthogonalization, by default
_SENT_BYTES = 2  # of Muon's matrices: bfloat16
_FLAG_BYTES = 4  # int32, for each parameter: whether any rank has its gradient


@dataclass(frozen=True)
class OwnerSteps:
    """The part of a rank's step that its owned parameters or matrices are.

    Attributes:
        matrices: names of the parameters that are matrices of Muon. messages: in the order in which they are sent.
        buffer_bytes: of what is sent and received, and what this rank owns in full.
        state_bytes: of an optimizer whose state is no number of entries for each element.
    """

    matrices: frozenset[str] = frozenset()
    messages: tuple[Message, ...] = ()
    buffer_bytes: int = 0
    state_bytes: int = 0


def owner_steps(root: Any, resolved: ResolvedPlan, setting: Setting, shards: Sequence[ParameterShard]) -> OwnerSteps:
    """Of the first rank of a pipeline stage; nothing where an optimizer steps each element by itself.

    Args:
        root: the model, on any device. shards: the parameters of that rank.
    """
    if setting.optimizer != MUON and setting.optimizer not in IN_FULL:
        return OwnerSteps()
    trained = {shard.name: shard for shard in shards if shard.trained}
    matrices = matrix_parameters(root, resolved, setting, shards)
    names = matrices if setting.optimizer == MUON else trained
    rows = {name: resolved.parameters[resolved.facts.parameter_fqns[name]] for name in names}
    axes = [axis for axis in setting.mesh.names if axis != "pp"]
    ranks = [setting.mesh.coordinates(rank) for rank in setting.mesh.group_of(0, *axes)] if axes else [{}]
    stored = [dict(_boxes(rows, setting, rank)) for rank in ranks]
    if setting.optimizer != MUON:
        return _full_steps(rows, stored, setting)
    units = [(name, box) for name in sorted(names) for box in matrices_of(root, name, rows[name].fact.shape, {})]
    owned = assign_owners(units, stored, partial(cost_of_matrix, num_steps=_ITERATIONS))
    both_ways = [exchanged_elements(owned, 0, len(ranks), to_owner=to_owner) for to_owner in (True, False)]
    local = sum(trained[name].local_numel(trained[name].splits.optimizer) for name in names)
    before, after = _most_bytes([matrix_shape_of(box.box) for box in owned if box.owner == 0], both_ways, len(ranks))
    buffers = max(before + local * setting.gradient_bytes, after) if owned else 0
    sent = zip(("matrices to their owners", "updates of matrices"), both_ways, strict=True)
    return OwnerSteps(matrices, _messages(sent, len(ranks), len(names), _SENT_BYTES, setting), buffers)


def _full_steps(rows: Mapping[str, ParameterRow], stored: list[dict[str, list[Box]]], setting: Setting) -> OwnerSteps:
    """Of an optimizer that steps each parameter in full: values and gradients to the owners, and new values back."""
    size, item = len(stored), setting.stepped_bytes
    units = [(name, full_box(row.fact.shape)) for name, row in sorted(rows.items())]
    whole = [box for name, box in units if is_everywhere(name, box, stored)]
    owned = assign_owners([unit for unit in units if not is_everywhere(*unit, stored)], stored, volume)
    to_owner, back = (exchanged_elements(owned, 0, size, to_owner=to_owner) for to_owner in (True, False))
    stepped = [box.box for box in owned if box.owner == 0]
    own = sum(map(volume, stepped))
    most = max(sum(sent) + sum(received) for sent, received in (to_owner, back))
    ways = (("values to their owners", to_owner), ("gradients to their owners", to_owner), ("new values", back))
    buffers = (2 * own + most) * item if owned else 0
    state = sum(map(_factors, [*whole, *stepped])) * item
    return OwnerSteps(frozenset(), _messages(ways, size, len(owned), item, setting), buffers, state)


def _factors(box: Box) -> int:
    """Elements of Adafactor's state of a parameter: means over rows and columns, and of a vector all squares."""
    elements, sizes = volume(box), shape_of(box)
    return elements // sizes[-1] + elements // sizes[-2] if len(sizes) > 1 else elements


def depends_on(resolved: ResolvedPlan, setting: Setting, shards: Sequence[ParameterShard]) -> Hashable:
    """What `owner_steps` of one model depends on; a constant where an optimizer steps each element by itself."""
    if setting.optimizer != MUON and setting.optimizer not in IN_FULL:
        return ()
    rows = (
        (shard, resolved.parameters[resolved.facts.parameter_fqns[shard.name]]) for shard in shards if shard.trained
    )
    stored = tuple((shard.name, shard.splits.optimizer, row.axis, row.layout) for shard, row in rows)
    zero, item = (bool(setting.zero), setting.zero == 3), (setting.gradient_bytes, setting.stepped_bytes)
    return stored, setting.optimizer, setting.mesh, setting.expert_ranks, zero, item


def matrix_parameters(
    root: Any, resolved: ResolvedPlan, setting: Setting, shards: Sequence[ParameterShard]
) -> frozenset[str]:
    """Names of the parameters that Muon steps as matrices; none where another optimizer steps."""
    if setting.optimizer != MUON:
        return frozenset()
    trained = [shard.name for shard in shards if shard.trained]
    facts = resolved.facts
    return frozenset(matrix_names(root, {name: facts.parameters[facts.parameter_fqns[name]].shape for name in trained}))


def _messages(
    ways: Iterable[tuple[str, tuple[list[int], list[int]]]], size: int, num_parameters: int, item: int, setting: Setting
) -> tuple[Message, ...]:
    """ways: what an exchange sends, and the elements that rank 0 sends to each and receives. item: bytes of one."""
    if size == 1 or not num_parameters:
        return ()
    axis = setting.group_name([name for name in setting.mesh.names if name != "pp"])
    messages = [Message("all_reduce", axis, size, num_parameters * _FLAG_BYTES, "gradients that exist", "step")]
    for module, (sent, received) in ways:
        remote, arriving = (sum(counts[1:]) * item for counts in (sent, received))
        messages.append(Message("all_to_all", axis, size, sum(sent) * item, module, "step", arriving, remote))
    return tuple(messages)


def _most_bytes(
    shapes: Sequence[tuple[int, int]], both_ways: Sequence[tuple[list[int], list[int]]], size: int
) -> tuple[int, int]:
    """The most bytes of matrices while updates of all elements are stored beside them (as they are sent to the owner,
    and as it orthogonalizes them), and after that, as results are sent back.

    shapes: of the matrices of this rank, in the order in which it computes them.
    """
    owned = sum(rows * columns for rows, columns in shapes)
    done = computing = 0
    for shape in shapes:
        elements, short = shape[0] * shape[1], min(shape)
        computing = max(computing, done + 2 * elements + 2 * short * short)  # x, the next x, its products with itself
        done += elements
    to_owner, back = (sum(sent) + (sum(received) if size > 1 else 0) for sent, received in both_ways)
    return (owned + max(to_owner, computing)) * _SENT_BYTES, (owned + back) * _SENT_BYTES


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
        part = pair.in_window(window)
        if part is not None:
            yield part.box
