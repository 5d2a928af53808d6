"""What a step sends over the data axes: gradients, and parameters that another rank has stepped. Arithmetic.

The buckets are those of `axes/zero/reducer.py` (one function partitions both). The gathers after a step are those of
`axes/zero/optimizer_shards.py`. Stage 3 is `fully_shard`: two gathers and a reduction per FSDP unit and microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallelize.axes.zero.data_ranks import GradientSize, partition
from parallelize.axes.zero.optimizer_shards import GATHER_BYTES
from parallelize.base.mesh import MeshSpec, folded
from parallelize.plan.parameter_shards import ParameterShard, zero_groups
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.trace_data import Message


@dataclass(frozen=True)
class DataView:
    """The data axes as a parameter sees them: those of the mesh, or for folded experts those of the mesh of experts.

    Attributes:
        axes: with more than one rank, over which gradients are summed. shard_axis: of these the one that ZeRO splits.
    """

    setting: Setting
    mesh: MeshSpec
    axes: tuple[str, ...]
    shard_axis: str

    @property
    def ranks(self) -> int:
        """The ranks that split what ZeRO splits."""
        return self.mesh.ranks(self.shard_axis)

    @property
    def splits_gradients(self) -> bool:
        """Whether each data rank keeps only its part of the gradients, apart from scalars."""
        return self.setting.zero >= 2 and self.ranks > 1

    def name(self, axes: Sequence[str]) -> str:
        return self.setting.group_name(axes) if self.mesh == self.setting.mesh else "*".join(axes)


def view_of(shard: ParameterShard, setting: Setting) -> DataView:
    """The data axes of a parameter."""
    if shard.axis == "ep":
        mesh = folded(setting.mesh, setting.expert_ranks)
        return DataView(setting, mesh, tuple(axis for axis in ("dp_replicate", "edp") if mesh.ranks(axis) > 1), "edp")
    return DataView(setting, setting.mesh, setting.data_axes, setting.shard_axis)


def buckets_of(shards: Sequence[ParameterShard], setting: Setting) -> list[list[ParameterShard]]:
    """Trained parameters by the bucket in which their gradients are reduced, in order."""
    trained = [shard for shard in shards if shard.trained]
    sizes = [
        GradientSize(
            (shard.stage, not shard.shape, shard.axis), shard.numel * setting.gradient_bytes, _is_late(shard, setting)
        )
        for shard in trained
    ]
    return [[trained[index] for index in indices] for indices in partition(sizes)]


def _is_late(shard: ParameterShard, setting: Setting) -> bool:
    """Whether the gradient is reduced when the step ends."""
    is_split = bool(shard.shape) and view_of(shard, setting).splits_gradients
    return shard.late or (_splits_gradients(setting) and not is_split)


def _splits_gradients(setting: Setting) -> bool:
    """Whether data ranks keep only their parts of most gradients, so that each backward reduces."""
    return setting.zero >= 2 and setting.size(setting.shard_axis) > 1


def data_messages(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[tuple[Message, int]]:
    """(message, how often a step sends it) of this rank over its data axes, except for the loss and the token count."""
    if not setting.data_axes:
        return
    if setting.zero == 3:
        yield from _fsdp_messages(shards, setting)
        return
    for bucket in buckets_of(shards, setting):
        view = view_of(bucket[0], setting)
        once = _is_late(bucket[0], setting) or setting.defer or not _splits_gradients(setting)
        scatters = view.splits_gradients and bool(bucket[0].shape)
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
    size = (sum(shard.numel for shard in bucket) + len(bucket)) * view.setting.gradient_bytes
    splits = view.splits_gradients
    axes = [axis for axis in view.axes if not (splits and axis == view.shard_axis)]
    for group in ([axes] if axes else []) + ([[view.shard_axis]] if splits else []):
        yield Message("all_reduce", view.name(group), view.mesh.ranks(*group), size, _bucket_name(bucket), "backward")


def _reduce_scatter(bucket: Sequence[ParameterShard], view: DataView) -> Iterator[Message]:
    axis, ranks, setting = view.shard_axis, view.ranks, view.setting
    local = (sum(shard.padded_numel(ranks) for shard in bucket) + len(bucket)) * setting.gradient_bytes
    op = "all_to_all" if setting.transport == "gloo" else "reduce_scatter"
    yield Message(op, axis, ranks, ranks * local, _bucket_name(bucket), "backward")
    others = [name for name in view.axes if name != axis]
    if others:
        name, size = view.name(others), view.mesh.ranks(*others)
        yield Message("all_reduce", name, size, local, _bucket_name(bucket), "backward")


def _gathers(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[Message]:
    """After a step, every rank gets the parameters back: large ones one by one, the others together."""
    if not shards or (view := view_of(shards[0], setting)).ranks == 1:
        return
    axis, ranks, item = view.shard_axis, view.ranks, setting.compute_bytes
    small_bytes, num_small = 0, 0
    for shard in shards:
        if not shard.trained or not shard.shape:
            continue
        if shard.rows % ranks == 0 and shard.numel * item >= GATHER_BYTES:
            yield Message("all_gather", axis, ranks, shard.numel * item, shard.name, "step")
        else:
            small_bytes, num_small = small_bytes + shard.padded_numel(ranks) * item, num_small + 1
    if num_small:
        yield Message("all_gather", axis, ranks, ranks * small_bytes, f"{num_small} small parameters", "step")


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
        reduced = trained * setting.gradient_bytes
        if ranks > 1 and trained:
            yield Message("reduce_scatter", axis, ranks, ranks * reduced, unit, "backward"), reductions
        for other in (axis for axis in view.axes if axis != view.shard_axis):
            if trained:
                yield Message("all_reduce", other, view.mesh.ranks(other), reduced, unit, "backward"), reductions
    everyone = setting.group_name(setting.data_axes)
    flags = Message(
        "all_reduce", everyone, setting.size(*setting.data_axes), len(shards), "used parameters", "backward"
    )
    yield flags, reductions  # one byte for each parameter; see `axes/zero/unused_parameters.py`
