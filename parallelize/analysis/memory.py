"""Bytes that a rank holds over a step: what stays, and what comes and goes with the schedule. Arithmetic.

What stays (parameters, gradients, optimiser state) is as `zero/memory.py` has it. What comes and goes are the recorded changes
of each segment, laid along the actions of the rank. Under ZeRO 2 and 3 buffers of communication are counted at their largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallelize.analysis.data_axes import buckets_of
from parallelize.analysis.records import Segment
from parallelize.analysis.setting import ITEM_BYTES, STATE_BYTES, Setting
from parallelize.analysis.shares import Share, zero_groups
from parallelize.analysis.step import RankStep, receives_early
from parallelize.pipeline.schedules import Action
from parallelize.pipeline.step import AHEAD
from parallelize.pipeline.timeline import Receive, Send


@dataclass(frozen=True)
class Moment:
    """One segment of one action: bytes of activations and new gradients when it begins, at its peak, when it ends."""

    action: str
    unit: str
    before: int
    peak: int
    after: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: that stay over steps (gradients from the first backward on). activations: their
            peak, with what travels between stages. buffers: of communication, the largest at once. peak: of everything.
        peak_at: action and unit. moments: the step in order.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    peak_at: str
    moments: tuple[Moment, ...] = ()


def _coming(step: RankStep) -> int:
    """Gradients that come with the first microbatch of each stage: in backward, or with a fused loss in the forward.

    (Of a tied weight the other copy's is not among them.)
    """
    passes = [step.segments(stage, later=False) for stage in step.mine]
    found = [segment for one in passes for segment in (*one.forward, *one.backward)]
    return sum(change.gradients for segment in found for change in segment.changes)


@dataclass(frozen=True)
class _Curve:
    """A segment's changes: net and highest, of activations alone and with gradients."""

    net: int
    high: int
    net_all: int
    high_all: int


def curve_of(segment: Segment) -> _Curve:
    now = high = now_all = high_all = 0
    for change in segment.changes:
        now += change.activations
        now_all += change.activations + change.gradients
        high, high_all = max(high, now), max(high_all, now_all)
    return _Curve(now, high, now_all, high_all)


def _joined(curves: Sequence[tuple[str, _Curve]]) -> tuple[str, _Curve]:
    """One curve for all, under the unit where it is highest."""
    net = high = net_all = high_all = 0
    where = ""
    for unit, curve in curves:
        high = max(high, net + curve.high)
        if net_all + curve.high_all > high_all:
            high_all, where = net_all + curve.high_all, unit
        net, net_all = net + curve.net, net_all + curve.net_all
    return where, _Curve(net, high, net_all, high_all)


def memory_of(step: RankStep, by_segment: bool = True) -> RankMemory:
    """What the rank of `step` holds. by_segment: moments of segments, rather than of whole actions."""
    setting, shares = step.setting, step.shares
    parameters, optimizer = parameters_bytes(shares, setting), optimizer_bytes(shares, setting)
    gradients, buffers = gradients_bytes(shares, setting), buffer_bytes(shares, setting, step.zero_units)
    stays = gradients - (0 if setting.reduces or setting.zero == 3 else _coming(step))
    walk = _Walk(step, by_segment)
    moments = tuple(walk.moments())
    top = max(moments, key=lambda moment: moment.peak, default=Moment("", "", 0, 0, 0))
    base = parameters + optimizer + stays
    last = _end_of_backward(shares, setting, step.zero_units)
    return RankMemory(
        parameters,
        gradients,
        optimizer,
        walk.most_activations,
        buffers,
        base + max(top.peak + buffers, gradients - stays + buffers, last),
        f"{top.action} {top.unit}".strip(),
        moments,
    )


class _Walk:
    """Goes through a rank's actions, adding up."""

    def __init__(self, step: RankStep, by_segment: bool):
        self.step, self.by_segment = step, by_segment
        self._actions: dict[tuple, list[tuple[str, _Curve]]] = {}
        self.most_activations = 0
        self._ends = "BI" if step.halves is None else "BW"  # actions that complete a microbatch's gradients
        self._keeps = step.setting.transport == "gloo"  # which does not tell that a message has gone
        self._leaving = 0  # bytes of the gradient that was sent last
        self._begun: set[int] = set()  # stages that have run a backward
        self._late = step.setting.reduces or step.setting.zero == 3  # gradients have their place before they come

    def moments(self) -> Iterator[Moment]:
        steps = self.step.steps
        ahead = AHEAD if self.step.setting.transport == "gloo" else 0
        early = receives_early(steps, ahead)
        activations = everything = 0
        for place, action in enumerate(steps):
            moved = sum(self._received(receive) for receive in early.get(place, ()))
            moved -= self._sent(action) if isinstance(action, Send) else 0
            activations, everything = activations + moved, everything + moved
            if not isinstance(action, Action):
                continue
            for unit, curve in self._curves_of(action):
                self.most_activations = max(self.most_activations, activations + curve.high)
                after = everything + curve.net_all
                yield Moment(str(action), unit, everything, everything + curve.high_all, after)
                activations, everything = activations + curve.net, after
            if action.kind in self._ends:
                gone = self._outputs_gone(action.stage)
                activations, everything = activations - gone, everything - gone

    def _sent(self, send: Send) -> int:
        """What was sent back before is gone by now."""
        if send.direction == "F" or self._keeps:
            return 0
        gone, self._leaving = self._leaving, self.step.boundary(send.stage).backward_bytes
        return gone

    def _outputs_gone(self, stage: int) -> int:
        """What a stage passed on to another rank it keeps until its own backward."""
        away = stage + 1 < self.step.schedule.num_stages and stage + 1 not in self.step.mine and not self._keeps
        return self.step.boundary(stage + 1).forward_bytes if away else 0

    def _curves_of(self, action: Action) -> list[tuple[str, _Curve]]:
        """(unit, curve) of what an action runs; of equal actions worked out once."""
        later = self._late or action.stage in self._begun
        if action.kind in self._ends:
            self._begun.add(action.stage)
        key = (action.stage, action.kind, later)
        if key not in self._actions:
            segments = self.step.segments(action.stage, later).of(action.kind)
            curves = [(segment.unit, curve_of(segment)) for segment in segments]
            self._actions[key] = curves if self.by_segment else [_joined(curves)]
        return self._actions[key]

    def _received(self, receive: Receive) -> int:
        into = receive.stage + (receive.direction == "B")
        boundary = self.step.boundary(into)
        return boundary.forward_bytes if receive.direction == "F" else boundary.backward_bytes


def parameters_bytes(shares: Sequence[Share], setting: Setting) -> int:
    """Stage 3 keeps its part in the weights' dtype, where compute is narrower; the others keep what they compute with."""
    if setting.zero == 3:
        ranks = setting.size(setting.shard_axis)
        item = ITEM_BYTES[setting.weights_dtype] if setting.narrow else setting.compute_bytes
        return sum(share.padded(ranks) for share in shares) * item
    return sum(share.numel for share in shares) * setting.compute_bytes


def optimizer_bytes(shares: Sequence[Share], setting: Setting) -> int:
    """State of trained parameters, and float32 copies where parameters are narrower."""
    ranks = setting.size(setting.shard_axis) if setting.zero else 1
    held = sum(share.own(ranks) for share in shares if share.trained)
    stepped = max(4, setting.compute_bytes) if setting.narrow or setting.zero == 3 else setting.compute_bytes
    copies = 4 if setting.narrow and setting.zero < 3 else 0
    return held * (STATE_BYTES[setting.optimizer] * stepped // 4 + copies)


def gradients_bytes(shares: Sequence[Share], setting: Setting) -> int:
    """As they are kept until the optimiser has stepped."""
    trained = [share for share in shares if share.trained]
    item = setting.gradient_bytes
    ranks = setting.size(setting.shard_axis)
    if setting.zero == 3 or (setting.zero == 2 and ranks > 1):
        whole = sum(share.numel + 1 for share in trained if not share.shape)
        return (sum(share.padded(ranks) for share in trained if share.shape) + whole) * item
    count = len(trained) if setting.reduces else 0  # a number a parameter says on how many ranks it had a gradient
    return (sum(share.numel for share in trained) + count) * item


def buffer_bytes(shares: Sequence[Share], setting: Setting, units: Sequence[str]) -> int:
    """Of messages on their way.

    ZeRO 2 keeps flat buckets for two reductions at once. ZeRO 3 has, where activations are at their most, what lies outside
    of units, one unit, and the next one on its way. Deferred reductions keep whole gradients until the step ends.
    """
    ranks = setting.size(setting.shard_axis)
    if ranks == 1:
        return 0
    deferred = sum(share.numel for share in shares if share.trained) * setting.gradient_bytes if setting.defer else 0
    if setting.zero == 2:
        split = [bucket for bucket in buckets_of(shares, setting) if bucket[0].shape]
        rows = sorted(sum(share.padded(ranks) for share in bucket) + len(bucket) for bucket in split)[-2:]
        copies = 2 * ranks + 1 if setting.transport == "gloo" else ranks + 1  # sent, (come,) and their sum
        return sum(rows) * copies * setting.gradient_bytes + deferred
    if setting.zero == 3:
        sizes = {
            unit: sum(share.padded(ranks) for share in group) for unit, group in zero_groups(shares, units).items()
        }
        rest = sizes.pop("", 0)
        return (rest + sum(sorted(sizes.values())[-2:])) * ranks * setting.compute_bytes + deferred
    return 0


def _end_of_backward(shares: Sequence[Share], setting: Setting, units: Sequence[str]) -> int:
    """ZeRO 3, when the activations are gone: a gathered group, its whole gradients, and what is scattered of them."""
    ranks = setting.size(setting.shard_axis)
    if setting.zero != 3 or ranks == 1:
        return 0
    sizes = [sum(share.padded(ranks) for share in group) * ranks for group in zero_groups(shares, units).values()]
    return max(sizes, default=0) * (2 * setting.compute_bytes + setting.gradient_bytes)
