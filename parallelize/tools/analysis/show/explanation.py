"""The result of `explain`, as data. Torch-free.

The fields of all classes here are keys of the JSON output. Bytes and counts are computed from the code that runs; times
are estimates and labeled so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallelize.tools.analysis.cost.intervals import Interval
from parallelize.tools.analysis.cost.load_balance import LoadBalance
from parallelize.tools.analysis.cost.memory import Moment, RankMemory
from parallelize.tools.analysis.cost.timing import StepTime


@dataclass(frozen=True)
class ParameterLine:
    """Equal parameters of equal layers.

    Attributes:
        count: how many there are. numel: elements of all of them, unsharded.
        style, rule: of the plan; empty without tp. rule: its place in the plan's file.
        full, local: shapes, unsharded and on the first tp rank.
        lies: the layout as text. dim: the dim that tp splits. owned: its intervals on each of the first tp ranks.
        stages: the first and the last stage that own one of them.
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
    """Equal messages of equal layers in one step of a rank.

    Attributes:
        bytes: bytes of the full tensor of one message. count: the number of messages.
        sent_bytes, seconds: totals of all messages; seconds is an estimate.
    """

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
    """All messages of a rank over one mesh axis in a step.

    Attributes:
        ranks: the largest group. count: of messages. bytes: of their full tensors. sent_bytes: that the rank sends.
        seconds: an estimate. link: "inside a node" or "between nodes".
    """

    axis: str
    ranks: int
    count: int
    bytes: int
    sent_bytes: float
    seconds: float
    link: str


@dataclass(frozen=True)
class RankReport:
    """One pp rank: the first rank of its tp and data groups.

    Attributes:
        units: of its stages, as text. parameters: elements that it stores without ZeRO. flops: of a step.
    """

    pp_rank: int
    units: str
    parameters: int
    flops: float
    memory: RankMemory
    messages: tuple[MessageLine, ...]
    totals: tuple[AxisTotal, ...]


@dataclass(frozen=True)
class WorstRouting:
    """A rank that gets all tokens of its group of `ep` in every layer, and the same rank where tokens are divided
    evenly.

    Attributes:
        rows, even_rows: the most tokens that it receives in a call of experts, with its own.
        choices, even_choices: the most pairs of a token and an expert that it computes in a call.
        received_bytes, even_received_bytes: from other ranks, over `ep`, in a step.
        peak_bytes, even_peak_bytes: the highest peak of its memory.
    """

    rows: int
    even_rows: int
    choices: int
    even_choices: int
    received_bytes: int
    even_received_bytes: int
    peak_bytes: int
    even_peak_bytes: int


@dataclass(frozen=True)
class Advice:
    """A change, as options of the command line, and its effect. step_s: the overlapped bound with it."""

    change: str
    gain: str
    step_s: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """What `explain` predicts of a model, a plan and a setting.

    Attributes:
        model, plan, plan_source, setting, machine: names, as text. mesh: axis -> size. options: fields of `Setting`.
        num_parameters: the number of parameters of the unsharded model.
        machine_memory_bytes, machine_constants, machine_sources: memory, constants and their sources in the hardware
            profile.
        parameters: one line for equal parameters. ranks: the first, a middle and the last pp rank.
        time: estimates. assumptions: of all figures, as text. advice: single changes that would help.
        activations_without_recompute, activations_with_recompute: the peak in bytes on the first pp rank, with
            recompute "off" and "full"; 0 where the model has nothing to recompute.
        worst_routing: of experts over `ep`; None without.
        kernels: what the verdict and the time are for, as text.
        device_bytes: of the GPU, at the highest peak: tensors, the context, and what the allocator needs at least.
        interval: between which seconds 90% of such steps are. not_scored: why it is not known for this hardware, if so.
        balance: of recorded lengths and routes; None without a record.
    """

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
    worst_routing: WorstRouting | None = None
    kernels: str = ""
    device_bytes: float = 0.0
    interval: Interval | None = None
    not_scored: str = ""
    balance: LoadBalance | None = None

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all ranks."""
        return max(rank.memory.peak for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether what a GPU needs at the highest peak is within the machine's memory."""
        return (self.device_bytes or self.peak_bytes) <= self.machine_memory_bytes

    def as_dict(self, moments: int = 400) -> dict[str, Any]:
        """Values that `json` can write. moments: the largest number of moments per rank; the highest ones are
        included."""
        values = asdict(self)
        values["peak_bytes"], values["fits"] = self.peak_bytes, self.fits
        for rank, report in zip(values["ranks"], self.ranks, strict=True):
            rank["memory"]["moments"] = [_moment_values(m) for m in _thinned(report.memory.moments, moments)]
        values["time"]["timeline"] = [
            [[str(action), start, stop] for action, start, stop in spans] for spans in self.time.timeline.spans
        ]
        return values


def _moment_values(moment: Moment) -> list[Any]:
    return [moment.action, moment.unit, moment.before, moment.peak, moment.after]


def _thinned(moments: Sequence[Moment], most: int) -> list[Moment]:
    """The moment with the highest peak of each of `most` runs of neighbors; all moments if there are no more than
    that."""
    if len(moments) <= most:
        return list(moments)
    step = len(moments) / most
    runs = [moments[int(n * step) : max(int((n + 1) * step), int(n * step) + 1)] for n in range(most)]
    return [max(run, key=lambda moment: moment.peak) for run in runs if run]
