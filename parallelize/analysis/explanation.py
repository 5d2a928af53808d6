"""What a plan does and costs on a mesh: the answer of `explain`, as data that prints itself as JSON. Torch-free.

Every figure of bytes and counts is arithmetic on what the code does; times are estimates, labelled so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from parallelize.analysis.memory import RankMemory
from parallelize.analysis.timing import StepTime


@dataclass(frozen=True)
class ParameterLine:
    """Equal parameters of equal layers. local: on the first tp rank. lies: how, in words. stages: first and last.

    dim, owned: the dim that is split, and the intervals of it that each of the first tp ranks holds.
    """

    name: str
    count: int
    style: str
    rule: str
    full: tuple[int, ...]
    local: tuple[int, ...]
    lies: str
    stages: tuple[int, int]
    numel: int
    dim: int | None = None
    owned: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True)
class MessageLine:
    """Equal messages of equal layers in one step of a rank. bytes: of one; sent_bytes, seconds (an estimate): of all."""

    op: str
    axis: str
    ranks: int
    phase: str
    module: str
    bytes: int
    count: int
    sent_bytes: float
    seconds: float = 0.0


@dataclass(frozen=True)
class AxisTotal:
    """Of one mesh axis in a step: messages, bytes of their tensors, bytes that the rank sends, seconds (an estimate)."""

    axis: str
    ranks: int
    count: int
    bytes: int
    sent_bytes: float
    seconds: float
    link: str


@dataclass(frozen=True)
class RankReport:
    """One rank of the pipeline (the first of its tp and data groups)."""

    pp_rank: int
    units: str
    parameters: int
    flops: float
    memory: RankMemory
    messages: tuple[MessageLine, ...]
    totals: tuple[AxisTotal, ...]


@dataclass(frozen=True)
class Advice:
    """A change, in the words of the command line, and what it would give."""

    change: str
    gain: str
    step_s: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """See the module. `fits`: whether the largest peak is below the machine's memory."""

    model: str
    plan: str
    plan_source: str
    setting: str
    mesh: Mapping[str, int]
    options: Mapping[str, Any]
    num_parameters: int
    machine: str
    machine_memory_bytes: float
    machine_sources: Mapping[str, str]
    machine_constants: Mapping[str, float]
    parameters: tuple[ParameterLine, ...]
    ranks: tuple[RankReport, ...]
    time: StepTime
    assumptions: tuple[str, ...]
    advice: tuple[Advice, ...] = ()
    activations_without_recompute: int = 0
    activations_with_recompute: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(rank.memory.peak for rank in self.ranks)

    @property
    def fits(self) -> bool:
        return self.peak_bytes < self.machine_memory_bytes

    def as_dict(self, moments: int = 400) -> dict[str, Any]:
        """JSON-ready. Of each rank's memory over the step at most so many moments are kept: those around its peaks too."""
        values = asdict(self)
        values["peak_bytes"], values["fits"] = self.peak_bytes, self.fits
        for rank, report in zip(values["ranks"], self.ranks, strict=True):
            rank["memory"]["moments"] = [asdict_moment(m) for m in thinned(report.memory.moments, moments)]
        values["time"]["timeline"] = [
            [[str(action), start, stop] for action, start, stop in spans] for spans in self.time.timeline.spans
        ]
        return values


def asdict_moment(moment: Any) -> list[Any]:
    return [moment.action, moment.unit, moment.before, moment.peak, moment.after]


def thinned(moments: Any, most: int) -> list[Any]:
    """Of many moments the one with the highest peak in each of `most` runs of neighbours."""
    if len(moments) <= most:
        return list(moments)
    step = len(moments) / most
    runs = [moments[int(n * step) : max(int((n + 1) * step), int(n * step) + 1)] for n in range(most)]
    return [max(run, key=lambda moment: moment.peak) for run in runs if run]
