"""What a step sends over the data axes: gradients, and parameters that were stepped elsewhere. Arithmetic.

The buckets are those of `zero/reducer.py` (the same function partitions both); what is gathered after a step those of
`zero/shards.py`; stage 3 is `fully_shard`: two gathers and a reduction a unit and microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallelize.analysis.records import Message
from parallelize.analysis.setting import Setting
from parallelize.analysis.shares import Share, zero_groups
from parallelize.zero.partition import Piece, partition
from parallelize.zero.shards import GATHER_BYTES


def buckets_of(shares: Sequence[Share], setting: Setting) -> list[list[Share]]:
    """Trained parameters whose gradients are sent together, in order."""
    trained = [share for share in shares if share.trained]
    split = setting.zero == 2 and setting.size(setting.shard_axis) > 1
    item = setting.gradient_bytes
    pieces = [Piece((s.stage, not s.shape), s.numel * item, s.late or (split and not s.shape)) for s in trained]
    return [[trained[place] for place in places] for places in partition(pieces)]


def data_messages(shares: Sequence[Share], setting: Setting, units: Sequence[str]) -> Iterator[tuple[Message, int]]:
    """(message, how often a step) of this rank over its data axes, apart from scalars."""
    if not setting.data_axes:
        return
    if setting.zero == 3:
        yield from _fully(shares, setting, units)
        return
    split = setting.zero == 2 and setting.size(setting.shard_axis) > 1
    for bucket in buckets_of(shares, setting):
        late = bucket[0].late or (split and not bucket[0].shape)
        times = 1 if late or setting.defer or not split else setting.microbatches
        sent = _split(bucket, setting) if split and bucket[0].shape else _whole(bucket, setting, split)
        for message in sent:
            yield message, times
    if setting.zero in (1, 2) and setting.size(setting.shard_axis) > 1:
        yield from ((message, 1) for message in _gathers(shares, setting))


def _where(bucket: Sequence[Share]) -> str:
    return bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} and {len(bucket) - 1} more"


def _whole(bucket: Sequence[Share], setting: Setting, split: bool) -> Iterator[Message]:
    """One all-reduce; a scalar under ZeRO 2 over the other axes first, then over the shard axis."""
    size = (sum(share.numel for share in bucket) + len(bucket)) * setting.gradient_bytes
    axes = [axis for axis in setting.data_axes if not (split and axis == setting.shard_axis)]
    for named in ([axes] if axes else []) + ([[setting.shard_axis]] if split else []):
        yield Message("all_reduce", setting.product(named), setting.size(*named), size, _where(bucket), "backward")


def _split(bucket: Sequence[Share], setting: Setting) -> Iterator[Message]:
    axis = setting.shard_axis
    ranks = setting.size(axis)
    row = (sum(share.padded(ranks) for share in bucket) + len(bucket)) * setting.gradient_bytes
    op = "all_to_all" if setting.transport == "gloo" else "reduce_scatter"
    yield Message(op, axis, ranks, ranks * row, _where(bucket), "backward")
    others = [name for name in setting.data_axes if name != axis]
    if others:
        yield Message("all_reduce", setting.product(others), setting.size(*others), row, _where(bucket), "backward")


def _gathers(shares: Sequence[Share], setting: Setting) -> Iterator[Message]:
    """After a step everyone gets all rows: large parameters one by one, the others together."""
    axis, item = setting.shard_axis, setting.compute_bytes
    ranks = setting.size(axis)
    together, count = 0, 0
    for share in shares:
        if not share.trained or not share.shape:
            continue
        if share.rows % ranks == 0 and share.numel * item >= GATHER_BYTES:
            yield Message("all_gather", axis, ranks, share.numel * item, share.name, "step")
        else:
            together, count = together + share.padded(ranks) * item, count + 1
    if count:
        yield Message("all_gather", axis, ranks, ranks * together, f"{count} small parameters", "step")


def _fully(shares: Sequence[Share], setting: Setting, units: Sequence[str]) -> Iterator[tuple[Message, int]]:
    axis, times = setting.shard_axis, setting.microbatches
    ranks = setting.size(axis)
    for unit, group in zero_groups(shares, units).items():
        size = sum(share.padded(ranks) for share in group)
        trained = sum(share.padded(ranks) for share in group if share.trained)
        if ranks > 1:
            whole = ranks * size * setting.compute_bytes
            yield Message("all_gather", axis, ranks, whole, unit, "forward"), times
            yield Message("all_gather", axis, ranks, whole, unit, "backward"), times
        reduced = trained * setting.gradient_bytes
        reductions = 1 if setting.defer else times
        if ranks > 1 and trained:
            yield Message("reduce_scatter", axis, ranks, ranks * reduced, unit, "backward"), reductions
        for other in ("dp_replicate", "cp"):
            if setting.size(other) > 1 and trained:
                yield Message("all_reduce", other, setting.size(other), reduced, unit, "backward"), reductions
