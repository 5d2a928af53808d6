"""`fit`: searches the meshes and options that train a model fastest on N devices, with reasons for what it rejects.

Settings are ranked without a walk through their actions, and where the model is a decoder of known form by its outline,
without a recording. Those that are shown are computed like `explain` computes a setting. The search does not vary the
global batch, the sequence length and the dtype.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.mesh import MeshSpec, possible_expert_ranks
from parallelize.tools.analysis.cost.in_flight import has_closed_form
from parallelize.tools.analysis.cost.intervals import interval_of
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.cost.memory import device_bytes, stored_bytes
from parallelize.tools.analysis.cost.setting import Setting, check_setting, make_setting
from parallelize.tools.analysis.linting import modes_served
from parallelize.tools.analysis.measure import AnySubject, measure_memory, measure_time, model_flops, outline_of
from parallelize.tools.analysis.subject import Subject, check

TRIES = 2
"""Settings of a mesh that are measured on the model itself, of those that its outline ranks first."""
_TOO_LARGE = "the peak, with the context and what the allocator holds, is above the memory"


@dataclass(frozen=True)
class Candidate:
    """A setting that fits. Its fields are keys of the JSON output.

    Attributes:
        step_s, mfu, bubble_fraction: estimates. in_turn_s: the sequential bound.
        low_s, high_s: between which 90% of such steps are.
        peak_bytes: tensors of the rank with the highest peak. device_bytes: with all else that its device needs.
    """

    setting: Setting
    step_s: float
    in_turn_s: float
    peak_bytes: int
    mfu: float
    bubble_fraction: float
    low_s: float = 0.0
    high_s: float = 0.0
    device_bytes: float = 0.0


@dataclass(frozen=True)
class Rejected:
    """Settings that were ruled out for one reason: how many, and one of them."""

    reason: str
    count: int
    example: str


_MODES = ("sequence_parallel", "loss_parallel")


@dataclass(frozen=True)
class Fitted:
    """The best setting of each of the best meshes, and why others were rejected. tried: the number of settings. modes:
    "sequence_parallel" and "loss_parallel", as far as they were on with `tp`."""

    best: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    tried: int
    memory_bytes: float
    modes: tuple[str, ...] = ()


class _Rejections:
    """Counts rejected settings by reason. last: the reason that was added last."""

    def __init__(self) -> None:
        self.last = ""
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, reason: str, setting: Setting) -> None:
        self.last = reason
        self._counts[reason] += 1
        self._examples.setdefault(reason, setting.describe())

    def most_common(self) -> tuple[Rejected, ...]:
        return tuple(Rejected(reason, count, self._examples[reason]) for reason, count in self._counts.most_common())


class _Known:
    """What the settings of one mesh that were measured say about others, in the order of `candidates`."""

    def __init__(self) -> None:
        self._fitting: set[Setting] = set()
        self._times: dict[Setting, float] = {}  # by all options but the microbatch size
        self._no_larger: dict[Setting, str] = {}  # why larger microbatches need not be measured

    def reason_against(self, setting: Setting) -> str:
        """Why a setting is not among the fastest; empty where that is not known."""
        if setting.recompute != "off" and replace(setting, recompute="off") in self._fitting:
            return "it fits without recompute, which is faster"
        return self._no_larger.get(self._with_smallest_microbatches(setting), "")

    def learn(self, setting: Setting, candidate: Candidate | None, *, is_too_large: bool) -> None:
        key = self._with_smallest_microbatches(setting)
        if candidate is None:
            if is_too_large:
                self._no_larger[key] = _TOO_LARGE
            return
        self._fitting.add(setting)
        if candidate.step_s >= self._times.get(key, float("inf")):
            self._no_larger[key] = "a smaller microbatch is faster"
        self._times[key] = candidate.step_s

    @staticmethod
    def _with_smallest_microbatches(setting: Setting) -> Setting:
        return replace(setting, num_microbatches=setting.batch)


def fit(
    subject: Subject,
    gpus: int,
    machine: Machine,
    *,
    memory_bytes: float | None = None,
    global_batch: int = 1024,
    sequence: int = 4096,
    dtype: str | None = "bfloat16",
    optimizer: str = "adamw",
    most: int = 5,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Fitted:
    """Search meshes and options for `gpus` devices.

    Args:
        subject: the model and the plan.
        gpus: number of devices. machine: one of them, and its links.
        memory_bytes: the memory of one device; None: the machine's.
        global_batch: sequences per step over all devices. sequence: tokens of a sequence.
        dtype: the compute dtype; None: that of the weights. optimizer: a key of `STATE_BYTES`.
        most: how many meshes to return.
        tell: is called with the name of each mesh before it is tried.
        options: further fields of `Options` and `Setting`, except `batch`. What is given here is not searched.

    Raises: ModelError `nothing-fits` where no setting fits, with the reasons; as `check_setting`.
    """
    if "batch" in options:
        raise ModelError(Problem("bad-option", "batch follows from global_batch and the mesh", fix="global_batch=..."))
    memory_limit = memory_bytes or machine.memory_bytes
    base = subject.complete(
        make_setting(MeshSpec(dp=1), {"sequence": sequence, "dtype": dtype, "optimizer": optimizer, **options})
    )
    check_setting(base)
    rejections, tried = _Rejections(), 0
    fixed = frozenset(name for name, value in options.items() if value is not None)
    best: dict[MeshSpec, Candidate] = {}
    screened: list[Candidate] = []
    layers, experts = len(subject.layers(base)), _num_experts(subject, base)
    screened_by, modes = outline_of(subject) or subject, _modes_over_tp(subject, base)
    for mesh in meshes(gpus, machine.node_ranks, max(layers, 1)):
        tell(str(mesh))
        known = _Known()
        foldings = _foldings(mesh, experts, base.etp, machine.node_ranks)
        for setting in candidates(replace(base, mesh=mesh), global_batch, rejections.add, fixed, foldings, modes):
            tried += 1
            reason = known.reason_against(setting)
            if not reason and lower_bound_s(screened_by, setting, machine) > _time_to_beat(best, mesh, most):
                reason = "even at the matmuls' full speed slower than what is shown"
            if reason:
                rejections.add(reason, setting)
                continue
            candidate = _screen(screened_by, setting, machine, memory_limit, rejections)
            known.learn(setting, candidate, is_too_large=rejections.last == _TOO_LARGE)
            if candidate is not None:
                screened.append(candidate)
                if mesh not in best or candidate.step_s < best[mesh].step_s:
                    best[mesh] = candidate
    tries = TRIES if screened_by is not subject else len(screened)
    exact = lambda setting: _try(subject, setting, machine, memory_limit, rejections)  # noqa: E731
    fastest = tuple(sorted(_exact(screened, most, exact, tries), key=lambda candidate: candidate.step_s))
    rejected = rejections.most_common()
    if not fastest:
        rows = tuple((f"{rejection.count} settings", rejection.reason) for rejection in rejected[:10])
        what = f"no mesh of {gpus} devices with {memory_limit / 1e9:.0f} GB trains this model"
        raise ModelError(Problem("nothing-fits", what, rows=rows, fix="more devices, a smaller batch or sequence"))
    on = tuple(name for name in _MODES if (getattr(base, name) if name in fixed else name in modes))
    return Fitted(fastest, rejected, tried, memory_limit, on)


def _exact(
    screened: Iterable[Candidate], most: int, measured: Callable[[Setting], Candidate | None], tries: int
) -> Iterator[Candidate]:
    """The fastest settings of different meshes, each measured with all of its microbatches, in order.

    tries: settings of one mesh that are measured, at most, after which the best of them stands for it.
    """
    shown: set[MeshSpec] = set()
    tried: Counter[MeshSpec] = Counter()
    queue = [(candidate.step_s, number, candidate, False) for number, candidate in enumerate(screened)]
    heapq.heapify(queue)
    while queue and len(shown) < most:
        _, number, candidate, is_exact = heapq.heappop(queue)
        if candidate.setting.mesh in shown:
            continue
        if is_exact:
            shown.add(candidate.setting.mesh)
            yield candidate
            continue
        if tried[candidate.setting.mesh] >= tries:
            continue
        exact = measured(candidate.setting)
        tried[candidate.setting.mesh] += exact is not None
        if exact is not None:
            heapq.heappush(queue, (exact.step_s, number, exact, True))


def _time_to_beat(best: dict[MeshSpec, Candidate], mesh: MeshSpec, most: int) -> float:
    """A setting must be faster than this to be returned."""
    if mesh in best:
        return best[mesh].step_s
    times = sorted(candidate.step_s for candidate in best.values())
    return times[most - 1] if len(times) >= most else float("inf")


def meshes(gpus: int, node_ranks: int, layers: int) -> Iterator[MeshSpec]:
    """Meshes with tp within a node, pp up to the number of layers, and dp for the rest."""
    for tp in (size for size in range(1, node_ranks + 1) if node_ranks % size == 0 and gpus % size == 0):
        for pp in range(1, min(layers, gpus // tp) + 1):
            if (gpus // tp) % pp or (pp > 1 and pp & (pp - 1) and layers % pp):
                continue
            yield MeshSpec([("pp", pp), ("dp", gpus // tp // pp), ("tp", tp)])


def _modes_over_tp(subject: Subject, base: Setting) -> list[str]:
    """What the plan serves of sequence and loss parallelism: both make a step over `tp` faster, or its memory less."""
    over_tp = replace(base, mesh=MeshSpec(tp=2))
    with suppress(ParallelizeError):  # a model without a plan has no meshes with tp, each of which says so
        plan = subject.plan_for(over_tp)
        return [] if plan is None else modes_served(subject, plan, over_tp)
    return []


def _num_experts(subject: Subject, setting: Setting) -> int:
    """Of one layer of a mixture; 0 for any other model."""
    modules = subject.model(setting.weights_dtype).modules.values()
    return next((module.num_experts for module in modules if module.num_experts), 0)


def _foldings(mesh: MeshSpec, experts: int, etp: int, node_ranks: int) -> tuple[int, ...]:
    """Values of `ep` that are tried: the smallest, the largest within a node, the largest of all. Each divides the
    experts."""
    folding = [ranks // etp for ranks in possible_expert_ranks(mesh) if ranks % etp == 0]
    possible = [ep for ep in folding if ep == 1 or (experts and experts % ep == 0)]
    within = [ep for ep in possible if ep * etp <= node_ranks]
    return tuple(sorted({*possible[:1], *within[-1:], *possible[-1:]}))


def candidates(
    base: Setting,
    global_batch: int,
    reject: Callable[[str, Setting], None],
    fixed: frozenset[str] = frozenset(),
    foldings: Sequence[int] = (1,),
    modes: Sequence[str] = _MODES,
) -> Iterator[Setting]:
    """Settings of one mesh.

    Args:
        reject: called with a reason and a setting where the mesh is not possible.
        fixed: options that keep the value of `base`.
        foldings: values of `ep`.
        modes: those that are on with `tp`.
    """
    dp, pp, tp = (base.size(axis) for axis in ("dp", "pp", "tp"))
    if global_batch % dp:
        reject(f"a global batch of {global_batch} sequences is not divisible by dp", base)
        return
    batch = global_batch // dp

    def choices(name: str, searched: Sequence[Any]) -> Sequence[Any]:
        return (getattr(base, name),) if name in fixed else searched

    on = {name: True for name in modes if tp > 1 and name not in fixed}
    counts = choices("num_microbatches", [batch // size for size in (1, 2, 4) if batch % size == 0])
    for count in counts:
        for schedule in choices("schedule", ("1f1b", "interleaved_1f1b", "zbv") if pp > 1 else ("1f1b",)):
            for zero in choices("zero", (0, 1, 2, 3) if dp > 1 else (0,)):
                if pp > 1 and zero > 1 and "zero" not in fixed:
                    continue  # each microbatch would gather or scatter again
                for ep, recompute in product(
                    choices("ep", foldings), choices("recompute", ("off", "selective", "full"))
                ):
                    options: dict[str, Any] = dict(on, batch=batch, num_microbatches=count, schedule=schedule)
                    yield replace(base, **options, zero=zero, ep=ep, recompute=recompute)


def lower_bound_s(subject: AnySubject, setting: Setting, machine: Machine) -> float:
    """The least time of a step: the model's matmuls at the machine's matmul speed, and the pipeline's bubble."""
    flops_per_s = machine.peak_flops[setting.dtype or setting.weights_dtype] * machine.matmul_efficiency
    flops = model_flops(subject, setting) * (4 / 3 if setting.recompute == "full" else 1.0)
    stages, count = setting.size("pp"), setting.step_microbatches
    # fraction of the stages that wait at both ends
    idle = {"1f1b": 1.0, "interleaved_1f1b": 0.5}.get(setting.schedule, 0.0)
    return flops / (flops_per_s * setting.mesh.world_size) * (count + idle * (stages - 1)) / count


def _screen(
    subject: AnySubject, setting: Setting, machine: Machine, memory_limit: float, rejections: _Rejections
) -> Candidate | None:
    """`_try` without a walk through all actions. A schedule without a closed form is computed by two steps of fewer
    microbatches, of which the second adds what each further one costs."""
    count = setting.step_microbatches
    filled = 2 * setting.size("pp")
    if has_closed_form(setting.schedule) or count < 4 * filled or count % filled:
        return _try(subject, setting, machine, memory_limit, rejections, walks=False)
    longer = _try(subject, _shortened(setting, 2 * filled), machine, memory_limit, rejections, setting, walks=False)
    if longer is None:
        return None
    shorter = _try(subject, _shortened(setting, filled), machine, memory_limit, rejections, setting, walks=False)
    if shorter is None:
        return None
    more = (count - 2 * filled) / filled
    step_s, in_turn_s, peak = (
        getattr(longer, name) + more * (getattr(longer, name) - getattr(shorter, name))
        for name in ("step_s", "in_turn_s", "peak_bytes")
    )
    if device_bytes(peak, setting, memory_limit, at_limit=True) > memory_limit:
        rejections.add(_TOO_LARGE, setting)
        return None
    return replace(longer, setting=setting, step_s=step_s, in_turn_s=in_turn_s, peak_bytes=int(peak))


def _shortened(setting: Setting, count: int) -> Setting:
    """The setting with fewer microbatches of the same size."""
    size = setting.batch // setting.step_microbatches
    return replace(setting, batch=size * count, num_microbatches=count)


def _try(
    subject: AnySubject,
    setting: Setting,
    machine: Machine,
    memory_limit: float,
    rejections: _Rejections,
    counted_as: Setting | None = None,
    *,
    walks: bool = True,
) -> Candidate | None:
    """The candidate that a setting is; None where it is refused or does not fit. An outline refuses nothing: what it is
    chosen by is tried on the model itself before it is shown."""
    counted_as = counted_as or setting
    try:
        if isinstance(subject, Subject):
            check(subject, setting)
            if device_bytes(_resident_bytes(subject, setting), setting, memory_limit, at_limit=True) > memory_limit:
                rejections.add("weights, gradients and optimizer state alone do not fit", counted_as)
                return None
        steps, memories = measure_memory(subject, setting, by_segment=False, walks=walks)
    except ParallelizeError as error:
        rejections.add(f"{error.problems[0].slug}: {error.problems[0].what}", counted_as)
        return None
    peak = max(memory.peak for memory in memories)
    needed = device_bytes(peak, setting, memory_limit, at_limit=True)
    if needed > memory_limit:
        rejections.add(_TOO_LARGE, counted_as)
        return None
    time = measure_time(subject, setting, machine, steps, memories, simulated=False)
    low, high = interval_of(time.step_s, setting, machine, has_experts=setting.ep > 1)
    return Candidate(setting, time.step_s, time.in_turn_s, peak, time.mfu, time.bubble_fraction, low, high, needed)


def _resident_bytes(subject: Subject, setting: Setting) -> int:
    """Bytes that the first pp rank stores over the step. They are known without a recording, which alone tells what
    parameters get no gradient: the optimizer state of those is counted too."""
    return sum(stored_bytes(subject.shards(setting, 0), setting, subject.matrix_parameters(setting, 0)))
