"""The course of memory over a segment, and what ZeRO 3 gathers beside it. Arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parallelize.plan.parameter_shards import ParameterShard, zero_groups
from parallelize.tools.analysis.cost.data_axes import view_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.cost.systems import OWN
from parallelize.tools.analysis.record.trace_data import LOSS, Segment


@dataclass(frozen=True)
class Curve:
    """The net sum and the highest partial sum of a segment's changes: of activations alone, and with gradients."""

    net: int
    peak: int
    net_all: int
    peak_all: int


def curves_of(segments: Sequence[Segment], units: GatheredUnits | None, is_backward: bool) -> list[tuple[str, Curve]]:
    """(unit, curve) of each segment. Under ZeRO 3 full gradients, which stay until the unit has run backward, and what
    is gathered count at its peak alone."""
    curves = [(segment.unit, curve_of(segment)) for segment in segments]
    if units is None:
        return curves
    beside = units.beside(segments, is_backward)
    return [
        (unit, replace(curve, net_all=curve.net, peak_all=max(start, curve.peak_all + running)))
        for (unit, curve), (start, running) in zip(curves, beside, strict=True)
    ]


def curve_of(segment: Segment) -> Curve:
    now = peak = now_all = peak_all = 0
    for change in segment.changes:
        now += change.activations
        now_all += change.activations + change.gradients
        peak, peak_all = max(peak, now), max(peak_all, now_all)
    return Curve(now, peak, now_all, peak_all)


def joined(curves: Sequence[tuple[str, Curve]]) -> tuple[str, Curve]:
    """One curve for all, with the unit where it is highest."""
    net = peak = net_all = peak_all = 0
    highest = ""
    for unit, curve in curves:
        peak = max(peak, net + curve.peak)
        if net_all + curve.peak_all > peak_all:
            peak_all, highest = net_all + curve.peak_all, unit
        net, net_all = net + curve.net, net_all + curve.net_all
    return highest, Curve(net, peak, net_all, peak_all)


# -- gathered units --------------------------------------------------------------------------------------------------
# What ZeRO 3 stores beside activations while a unit runs: gathered parameters, and full gradients on their way to
# their shards. As `fully_shard` does, a unit is gathered into one buffer, from which its parameters are copied. In
# backward the unit that runs next is gathered meanwhile, and the gradients of the unit that ran before are being
# reduced. Folded experts are units inside that of their layer: the unit before or after one of them in order is the
# layer's or another layer's, never other experts. Arithmetic.


class UnitBuffers(NamedTuple):
    """Bytes while one unit of the model, such as a layer, runs.

    start: all parameters, as the last ones are copied from the buffer that was gathered. running: all of them. beside:
    as the unit before or after another one: its own parameters, without those of experts inside. gradients: of these.
    """

    start: int
    running: int
    beside: int
    gradients: int


class GatheredUnits:
    """The buffers of each unit of one rank."""

    def __init__(self, shards: Sequence[ParameterShard], setting: Setting):
        self.setting = setting
        groups = zero_groups(shards)
        item, gradient = setting.compute_bytes, setting.gradient_bytes
        self.sizes = {name: gathered_bytes(group, setting, item) for name, group in groups.items()}
        self.gradients = {name: gathered_bytes(group, setting, gradient, 0) for name, group in groups.items()}
        self.reordered = {name: _reordered_numel(group) for name, group in groups.items()}
        self.outside = self.sizes.pop("", 0)
        self._known: dict[str, UnitBuffers] = {}

    def of(self, unit: str) -> UnitBuffers:
        """The buffers while `unit`, such as a layer, runs."""
        if unit not in self._known:
            self._known[unit] = UnitBuffers(0, 0, 0, 0) if self._is_outside(unit) else self._buffers(unit)
        return self._known[unit]

    def _is_outside(self, unit: str) -> bool:
        """Whether nothing is gathered: the loss runs when the model's own parameters are shards again, unless it
        computes with the head's. (PyTorch's `fully_shard` leaves those of the root gathered by default.)"""
        return unit == LOSS and self.setting.system == OWN and not self.setting.fuse_loss

    def beside(self, segments: Sequence[Segment], is_backward: bool) -> Iterator[tuple[int, int]]:
        """(bytes as each segment begins, bytes while it runs) of gathered parameters and of full gradients on their
        way."""
        scattered = 0  # bytes of gradients of the unit before, which are being reduced
        buffers = [self.of(segment.unit) for segment in segments]
        for n, own in enumerate(buffers):
            following = next((unit.beside for unit in buffers[n + 1 :] if unit.beside), 0) if own.running else 0
            yield own.start, own.running + (following + scattered if is_backward else 0)
            scattered = own.gradients or scattered

    def _buffers(self, unit: str) -> UnitBuffers:
        compute = self.setting.compute_bytes
        names = [name for name in self.sizes if _is_inside(name, unit)]
        gathered = self.outside + sum(self.sizes[name] for name in names)
        copied = max((self.sizes[name] + self.reordered[name] * compute for name in names), default=0)
        return UnitBuffers(gathered + copied, gathered, self.sizes.get(unit, 0), self.gradients.get(unit, 0))


def gathered_bytes(group: Sequence[ParameterShard], setting: Setting, item: int, times_of_codes: int = 1) -> int:
    """Bytes of an FSDP unit that is gathered; with one rank, of the copy that `fully_shard` makes instead.

    item: of an element that is no code of a quantized weight. times_of_codes: how often the codes' own bytes are
    counted.
    """
    ranks = view_of(group[0], setting).ranks
    sizes = (s.padded_numel(ranks) * (s.code_bytes * times_of_codes if s.code_bytes else item) for s in group)
    return sum(sizes) * ranks


def _reordered_numel(group: Sequence[ParameterShard]) -> int:
    """Elements that are split along another dim than the first: what is gathered is put in order by a copy."""
    return sum(shard.numel for shard in group if shard.zero_dim and shard.splits.parameter > 1)


def _is_inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")
