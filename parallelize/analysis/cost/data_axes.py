"""What a step sends over the data axes: gradients, and parameters that another rank has stepped. Arithmetic.

The buckets are those of `zero/reducer.py` (one function partitions both). The gathers after a step are those of
`zero/optimizer_shards.py`. Stage 3 is `fully_shard`: two gathers and a reduction per FSDP unit and microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallelize.analysis.cost.setting import Setting
from parallelize.analysis.record.trace_data import Message
from parallelize.plan.parameter_shards import ParameterShard, splits_of, zero_groups
from parallelize.zero.optimizer_shards import GATHER_BYTES
from parallelize.zero.partition import GradientSize, partition


def buckets_of(shards: Sequence[ParameterShard], setting: Setting) -> list[list[ParameterShard]]:
    """Trained parameters by the bucket in which their gradients are reduced, in order."""
    trained = [shard for shard in shards if shard.trained]
    sizes = [
        GradientSize((shard.stage, not shard.shape), shard.numel * setting.gradient_bytes, _is_late(shard, setting))
        for shard in trained
    ]
    return [[trained[index] for index in indices] for indices in partition(sizes)]


def _splits_gradients(setting: Setting) -> bool:
    """Whether each data rank keeps only its part of the gradients, apart from scalars."""
    return splits_of(setting.zero, setting.mesh).gradient > 1


def _is_late(shard: ParameterShard, setting: Setting) -> bool:
    """Whether the gradient is reduced when the step ends."""
    return shard.late or (_splits_gradients(setting) and not shard.shape)


def data_messages(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[tuple[Message, int]]:
    """(message, how often a step sends it) of this rank over its data axes, except for the loss and the token count."""
    if not setting.data_axes:
        return
    if setting.zero == 3:
        yield from _fsdp_messages(shards, setting)
        return
    splits = _splits_gradients(setting)
    for bucket in buckets_of(shards, setting):
        once = _is_late(bucket[0], setting) or setting.defer or not splits
        scatters = splits and bool(bucket[0].shape)
        messages = _reduce_scatter(bucket, setting) if scatters else _all_reduce(bucket, setting, splits)
        for message in messages:
            yield message, 1 if once else setting.step_microbatches
    if setting.zero in (1, 2) and setting.size(setting.shard_axis) > 1:
        yield from ((message, 1) for message in _gathers(shards, setting))


def _bucket_name(bucket: Sequence[ParameterShard]) -> str:
    return bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} and {len(bucket) - 1} more"


def _all_reduce(bucket: Sequence[ParameterShard], setting: Setting, splits: bool) -> Iterator[Message]:
    """One all-reduce. Scalars under ZeRO 2 (`splits`) are reduced over the other axes first, then over the shard axis.

    Each gradient is sent with one number, which counts the ranks that have it.
    """
    size = (sum(shard.numel for shard in bucket) + len(bucket)) * setting.gradient_bytes
    axes = [axis for axis in setting.data_axes if not (splits and axis == setting.shard_axis)]
    for group in ([axes] if axes else []) + ([[setting.shard_axis]] if splits else []):
        name = setting.group_name(group)
        yield Message("all_reduce", name, setting.size(*group), size, _bucket_name(bucket), "backward")


def _reduce_scatter(bucket: Sequence[ParameterShard], setting: Setting) -> Iterator[Message]:
    axis = setting.shard_axis
    ranks = setting.size(axis)
    local = (sum(shard.padded_numel(ranks) for shard in bucket) + len(bucket)) * setting.gradient_bytes
    op = "all_to_all" if setting.transport == "gloo" else "reduce_scatter"
    yield Message(op, axis, ranks, ranks * local, _bucket_name(bucket), "backward")
    others = [name for name in setting.data_axes if name != axis]
    if others:
        group = setting.group_name(others)
        yield Message("all_reduce", group, setting.size(*others), local, _bucket_name(bucket), "backward")


def _gathers(shards: Sequence[ParameterShard], setting: Setting) -> Iterator[Message]:
    """After a step, every rank gets the parameters back: large ones one by one, the others together."""
    axis, item = setting.shard_axis, setting.compute_bytes
    ranks = setting.size(axis)
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
    axis, times = setting.shard_axis, setting.step_microbatches
    ranks = setting.size(axis)
    reductions = 1 if setting.defer else times
    for unit, group in zero_groups(shards).items():
        numel = sum(shard.padded_numel(ranks) for shard in group)
        trained = sum(shard.padded_numel(ranks) for shard in group if shard.trained)
        if ranks > 1:
            full_bytes = ranks * numel * setting.compute_bytes
            yield Message("all_gather", axis, ranks, full_bytes, unit, "forward"), times
            yield Message("all_gather", axis, ranks, full_bytes, unit, "backward"), times
        reduced = trained * setting.gradient_bytes
        if ranks > 1 and trained:
            yield Message("reduce_scatter", axis, ranks, ranks * reduced, unit, "backward"), reductions
        for other in ("dp_replicate", "cp"):
            if setting.size(other) > 1 and trained:
                yield Message("all_reduce", other, setting.size(other), reduced, unit, "backward"), reductions
    everyone = setting.group_name(setting.data_axes)
    flags = Message(
        "all_reduce", everyone, setting.size(*setting.data_axes), len(shards), "used parameters", "backward"
    )
    yield flags, reductions  # one byte for each parameter; see `zero/unused_parameters.py`
