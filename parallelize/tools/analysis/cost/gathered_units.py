"""What ZeRO 3 stores beside activations while a unit runs: gathered parameters, and full gradients on their way to their shards.

As `fully_shard` does, a unit is gathered into one buffer, from which its parameters are copied. In backward the unit that runs next is
gathered meanwhile, and the gradients of the unit that ran before are being reduced. Folded experts are units inside that of their layer:
the unit before or after one of them in order is the layer's or another layer's, never other experts. Arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallelize.plan.parameter_shards import ParameterShard, zero_groups
from parallelize.tools.analysis.cost.curves import curve_of
from parallelize.tools.analysis.cost.data_axes import view_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.trace_data import Segment


class UnitBuffers(NamedTuple):
    """Bytes while one unit of the model, such as a layer, runs.

    start: all parameters, as the last ones are copied from the buffer that was gathered. running: all of them.
    beside: as the unit before or after another one: its own parameters, without those of experts inside. gradients: of these.
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
            self._known[unit] = self._buffers(unit)
        return self._known[unit]

    def peak(self, segments: Sequence[Segment], is_backward: bool) -> int:
        """The highest sum of activations, gathered parameters and full gradients in an action, over activations before it."""
        peak = net = scattered = 0  # scattered: bytes of gradients of the unit before, which are being reduced
        buffers = [self.of(segment.unit) for segment in segments]
        for n, (segment, own) in enumerate(zip(segments, buffers, strict=True)):
            curve = curve_of(segment)
            following = next((unit.beside for unit in buffers[n + 1 :] if unit.beside), 0)
            running = own.running + (following + scattered if is_backward else 0)
            peak = max(peak, net + own.start, net + curve.peak_all + running)
            net += curve.net
            scattered = own.gradients or scattered
        return peak

    def _buffers(self, unit: str) -> UnitBuffers:
        compute = self.setting.compute_bytes
        names = [name for name in self.sizes if _is_inside(name, unit)]
        gathered = self.outside + sum(self.sizes[name] for name in names)
        copied = max((self.sizes[name] + self.reordered[name] * compute for name in names), default=0)
        return UnitBuffers(gathered + copied, gathered, self.sizes.get(unit, 0), self.gradients.get(unit, 0))


def gathered_bytes(group: Sequence[ParameterShard], setting: Setting, item: int, times_of_codes: int = 1) -> int:
    """Bytes of an FSDP unit that is gathered; with one rank, of the copy that `fully_shard` makes instead.

    item: of an element that is no code of a quantized weight. times_of_codes: how often the codes' own bytes are counted.
    """
    ranks = view_of(group[0], setting).ranks
    sizes = (s.padded_numel(ranks) * (s.code_bytes * times_of_codes if s.code_bytes else item) for s in group)
    return sum(sizes) * ranks


def _reordered_numel(group: Sequence[ParameterShard]) -> int:
    """Elements that are split along another dim than the first: what is gathered is put in order by a copy."""
    return sum(shard.numel for shard in group if shard.zero_dim and shard.splits.parameter > 1)


def _is_inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")
