"""Bytes of gradients that a rank stores at each moment of a step, as each ZeRO stage makes and frees them. Arithmetic.

| gradients | stored before the first backward | in backward |
|---|---|---|
| of one rank | nothing | each as it is computed: the recorded segments have it |
| ZeRO 0 and 1 | all, in flat buffers | nothing more |
| ZeRO 2 | what no rank splits | full until their bucket is sent, then this rank's rows |
| ZeRO 3 | nothing | this rank's rows when their unit has run; its full ones are counted with the unit |

With `defer` ZeRO 2 and 3 store full gradients until a stage's last backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from parallelize.axes.pipeline.schedules import Action
from parallelize.plan.parameter_shards import ParameterShard, zero_groups
from parallelize.tools.analysis.cost.data_axes import buckets_of, view_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.cost.training_step import RankStep


def is_buffered(setting: Setting) -> bool:
    """Whether all gradients have their memory before the first backward."""
    return setting.uses_reducer and not setting.splits_gradients


def pool_bytes(shards: Sequence[ParameterShard], setting: Setting) -> int:
    """The flat buffers of two reductions at once, which ZeRO 2 keeps from step to step."""
    if setting.zero != 2 or not setting.splits_gradients:
        return 0
    numels = []
    for bucket in buckets_of(shards, setting):
        ranks = view_of(bucket[0], setting).ranks
        copies = 2 * ranks + 1 if setting.transport == "gloo" else ranks + 1  # sent, (received with gloo), summed
        if bucket[0].shape and ranks > 1:
            numels.append((sum(shard.padded_numel(ranks) for shard in bucket) + len(bucket)) * copies)
    return sum(sorted(numels)[-2:]) * setting.gradient_bytes


@dataclass
class _ReducedTogether:
    """Parameters whose gradients are reduced together.

    Attributes:
        full: of each, the units whose backward gives its gradient ("": what runs last), and the gradient's bytes.
        rows: bytes of this rank's rows of them.
        late: whether they are reduced when the step ends.
    """

    full: list[tuple[frozenset[str], int]]
    rows: int
    stage: int
    late: bool

    @cached_property
    def units(self) -> frozenset[str]:
        return frozenset[str]().union(*(units for units, _ in self.full))

    def bytes_after(self, done: Set[str]) -> int:
        """Of gradients that these units have given."""
        return sum(size for units, size in self.full if units & done)


class SplitGradients:
    """Of ZeRO 2 and 3: what is stored beside the segments, action by action.

    Attributes:
        stored: bytes after the actions that were followed.
    """

    def __init__(self, step: RankStep):
        self.step, self.setting = step, step.setting
        self._giving = {
            (stage, kind) for stage in step.local_stages for kind in "BIW" if self._bytes_given(stage, kind)
        }
        actions = (action for action in step.steps if isinstance(action, Action))
        self._left = Counter(action.stage for action in actions if (action.stage, action.kind) in self._giving)
        self._groups = list(self._buckets() if self.setting.zero == 2 else self._units())
        self._of_unit: dict[str, list[int]] = {}
        for index, group in enumerate(self._groups):
            for unit in group.units:
                self._of_unit.setdefault(unit, []).append(index)
        self._full: dict[int, int] = {}  # index of a group -> bytes of full gradients
        self._rows: set[int] = set()  # groups of which this rank's rows are stored
        self._bytes = 0  # of both
        self._reduced: set[int] = set()  # in the action that was followed last
        self._sent: list[int] = []  # buckets on their way, whose rows are stored when the next one is sent
        self._early = 0  # bytes of gradients that a fused loss has made in forward

    @property
    def stored(self) -> int:
        return self._bytes + self._early

    def before_each(self, action: Action, units: Sequence[str]) -> list[int]:
        """Bytes that are stored as each unit of an action begins."""
        if action.kind == "F":
            before = [self.stored] * len(units)
            self._early = max(self._early, self._bytes_given(action.stage, "F"))
            return before
        if (action.stage, action.kind) not in self._giving:
            return [self.stored] * len(units)
        self._left[action.stage] -= 1
        waits = self.setting.defer and self._left[action.stage] > 0
        before, done = [], set[str]()
        self._reduced.clear()
        for unit in units:
            before.append(self.stored)
            done.add(unit)
            self._after(action.stage, unit, done, waits)
        for index, group in enumerate(self._groups):
            if group.stage == action.stage and not waits and not group.late and index not in self._reduced:
                self._reduce(index)
        return before

    def finish(self) -> int:
        """All backwards have ended: the most bytes while what is left is reduced."""
        most = self.stored
        for index in range(len(self._groups)):
            self._reduce(index)
            most = max(most, self.stored)
        self._deliver(0)
        return max(most, self.stored)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _buckets(self) -> list[_ReducedTogether]:
        groups = []
        for bucket in buckets_of(self.step.shards, self.setting):
            ranks = view_of(bucket[0], self.setting).ranks
            if bucket[0].shape and ranks > 1:
                groups.append(self._group(bucket, ranks, any(shard.late for shard in bucket)))
        return groups

    def _units(self) -> list[_ReducedTogether]:
        groups = zero_groups([shard for shard in self.step.shards if shard.trained]).values()
        return [self._group(group, view_of(group[0], self.setting).ranks, late=False) for group in groups]

    def _group(self, shards: Sequence[ParameterShard], ranks: int, late: bool) -> _ReducedTogether:
        item = self.setting.gradient_bytes
        full = [(frozenset(map(self._unit_of, shard.names)), shard.numel * item) for shard in shards]
        rows = sum(shard.padded_numel(ranks) for shard in shards) * item
        return _ReducedTogether(full, rows, shards[0].stage, late)

    def _unit_of(self, name: str) -> str:
        stages = self.step.stages
        return (stages.unit_of(name) if stages is not None else None) or ""

    def _bytes_given(self, stage: int, kind: str) -> int:
        """Gradients that an action makes: W where dgrad and wgrad run apart, I where a recomputed unit runs both."""
        segments = self.step.segments(stage, later=False).of(kind)
        return sum(change.gradients for segment in segments for change in segment.changes)

    # -- moments ------------------------------------------------------------------------------------------------------

    def _after(self, stage: int, unit: str, done: set[str], waits: bool) -> None:
        """A unit has run backward: its gradients are stored in full, or reduced where their group is complete."""
        for index in self._of_unit.get(unit, ()):
            group = self._groups[index]
            if group.stage != stage and not group.late:
                continue
            self._early = 0  # the head's are among those of its group now
            if waits or group.late or not group.units <= done:
                now = self._full_bytes(group, waits, group.bytes_after(done))
                self._store_full(index, max(self._full.get(index, 0), now))
            elif unit:
                self._reduce(index)

    def _full_bytes(self, group: _ReducedTogether, waits: bool, size: int) -> int:
        """What is stored of full gradients. Those that wait for the rest of their bucket have the dtype of compute."""
        if self.setting.zero == 3 and not waits:
            return 0
        return size if waits or group.late else size * self.setting.compute_bytes // self.setting.gradient_bytes

    def _store_full(self, index: int, size: int) -> None:
        self._bytes += size - self._full.get(index, 0)
        self._full[index] = size

    def _store_rows(self, index: int) -> None:
        self._rows.add(index)
        self._bytes += self._groups[index].rows

    def _reduce(self, index: int) -> None:
        self._store_full(index, 0)
        self._reduced.add(index)
        if index in self._rows:
            return
        if self.setting.zero == 3:
            self._store_rows(index)
        elif index in self._sent:  # by the microbatch before
            self._sent.remove(index)
            self._store_rows(index)
        else:
            self._sent.append(index)
            self._deliver(1)

    def _deliver(self, on_their_way: int) -> None:
        while len(self._sent) > on_their_way:
            self._store_rows(self._sent.pop(0))
