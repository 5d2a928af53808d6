"""`fit`: which mesh and options train a model on N devices of so much memory, the fastest first. Searched, with reasons.

Candidates are tried in full (`explain`'s own arithmetic), but for those that the resident bytes alone rule out. What the
search does not vary it keeps as given: the global batch, the sequence, the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parallelize.analysis.explain import measure, model_flops
from parallelize.analysis.machine import Machine
from parallelize.analysis.memory import gradients_bytes, optimizer_bytes, parameters_bytes
from parallelize.analysis.setting import Setting, check_setting
from parallelize.analysis.subject import Subject, check
from parallelize.errors import ModelError, ParallelizeError, Problem
from parallelize.mesh import MeshSpec

SLACK = 0.92  # share of the memory that a step may use; the rest is for the context, NCCL and fragmentation


@dataclass(frozen=True)
class Candidate:
    """A setting that fits. step_s: the overlapped bound; peak_bytes: of the largest rank; mfu: of that bound."""

    setting: Setting
    step_s: float
    in_turn_s: float
    peak_bytes: int
    mfu: float
    bubble_fraction: float


@dataclass(frozen=True)
class Rejected:
    """Settings that were ruled out for one reason: how many, one of them, and why."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Fitted:
    """The best setting of each of the best meshes, and why others are not among them."""

    best: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    tried: int
    memory_bytes: float


@dataclass
class _Tally:
    reasons: dict[str, list]

    def add(self, reason: str, setting: Setting) -> None:
        held = self.reasons.setdefault(reason, [0, setting.describe()])
        held[0] += 1


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
) -> Fitted:
    """Search meshes and options for `gpus` devices.

    Args:
        memory_bytes: of one device (default: the machine's). global_batch: sequences a step over all devices.
        tell: is called with a word on each mesh that is tried.

    Raises: ModelError `nothing-to-fit` where no candidate can even be built, with the reasons.
    """
    limit = memory_bytes or machine.memory_bytes
    base = Setting(MeshSpec(dp=1), sequence=sequence, dtype=dtype, optimizer=optimizer)
    check_setting(base)
    tally, tried = _Tally({}), 0
    found: dict[MeshSpec, Candidate] = {}  # the best of each mesh
    layers = len(subject.layers(base))
    for mesh in meshes(gpus, machine.node_ranks, max(layers, 1)):
        tell(str(mesh))
        for setting in candidates(replace(base, mesh=mesh), global_batch, tally.add):
            tried += 1
            if least_s(subject, setting, machine) > _to_beat(found, mesh, most):
                tally.add("even at the products' full speed slower than what is shown", setting)
                continue
            candidate = _try(subject, setting, machine, limit, tally)
            if candidate is not None and (mesh not in found or candidate.step_s < found[mesh].step_s):
                found[mesh] = candidate
    rejected = tuple(Rejected(reason, *held) for reason, held in sorted(tally.reasons.items(), key=lambda i: -i[1][0]))
    if not found:
        rows = tuple((f"{one.count} settings", one.reason) for one in rejected[:10])
        what = f"no mesh of {gpus} devices with {limit / 1e9:.0f} GB trains this model"
        raise ModelError(Problem("nothing-fits", what, rows=rows, fix="more devices, a smaller batch or sequence"))
    best = sorted(found.values(), key=lambda one: one.step_s)
    return Fitted(tuple(best[:most]), rejected, tried, limit)


def _to_beat(found: dict[MeshSpec, Candidate], mesh: MeshSpec, most: int) -> float:
    """The time that a setting must be faster than to be shown."""
    if mesh in found:
        return found[mesh].step_s
    times = sorted(one.step_s for one in found.values())
    return times[most - 1] if len(times) >= most else float("inf")


def meshes(gpus: int, node: int, layers: int) -> Iterator[MeshSpec]:
    """tp within a node, pp up to the number of layers, dp the rest."""
    for tp in (size for size in range(1, node + 1) if node % size == 0 and gpus % size == 0):
        for pp in range(1, min(layers, gpus // tp) + 1):
            if (gpus // tp) % pp or (pp > 1 and pp & (pp - 1) and layers % pp):
                continue
            yield MeshSpec([("pp", pp), ("dp", gpus // tp // pp), ("tp", tp)])


def candidates(base: Setting, global_batch: int, reject: Callable[[str, Setting], None]) -> Iterator[Setting]:
    """Options on one mesh."""
    dp, pp, tp = (base.size(axis) for axis in ("dp", "pp", "tp"))
    if global_batch % dp:
        reject(f"a global batch of {global_batch} sequences does not divide by dp", base)
        return
    batch = global_batch // dp
    modes = {"sequence_parallel": True, "loss_parallel": True} if tp > 1 else {}
    for rows in (1, 2, 4):
        if batch % rows:
            continue
        count = batch // rows
        for schedule in ("1f1b", "interleaved_1f1b", "zbv") if pp > 1 else ("1f1b",):
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                if pp > 1 and zero > 1:
                    continue  # each microbatch would gather or scatter again
                for recompute in ("off", "selective", "full"):
                    options: dict[str, Any] = dict(
                        modes, batch=batch, num_microbatches=count, zero=zero, recompute=recompute
                    )
                    yield replace(base, schedule=schedule, **options)


def least_s(subject: Subject, setting: Setting, machine: Machine) -> float:
    """What a step takes at the least: the model's products at the speed that products reach, and the pipeline's bubble."""
    peak = machine.peak_flops[setting.dtype or setting.weights_dtype] * machine.matmul_efficiency
    flops = model_flops(subject, setting) * (4 / 3 if setting.recompute == "full" else 1.0)
    stages, count = setting.size("pp"), setting.microbatches
    share = {"1f1b": 1.0, "interleaved_1f1b": 0.5}.get(setting.schedule, 0.0)  # of the stages that wait at both ends
    return flops / (peak * setting.mesh.world_size) * (count + share * (stages - 1)) / count


def _try(subject: Subject, setting: Setting, machine: Machine, limit: float, tally: _Tally) -> Candidate | None:
    try:
        check(subject, setting)
        if _resident(subject, setting) > limit * SLACK:
            tally.add("weights, gradients and optimiser state alone do not fit", setting)
            return None
        _, memories, time = measure(subject, setting, machine, by_segment=False)
    except ParallelizeError as error:
        tally.add(f"{error.problems[0].slug}: {error.problems[0].what}", setting)
        return None
    peak = max(memory.peak for memory in memories)
    if peak > limit * SLACK:
        tally.add(f"the peak is above {SLACK:.0%} of the memory", setting)
        return None
    return Candidate(setting, time.overlapped_s, time.in_turn_s, peak, time.mfu_overlapped, time.bubble_fraction)


def _resident(subject: Subject, setting: Setting) -> int:
    """Bytes that stay on the first rank: no need to record anything for those."""
    shares = subject.shares(setting, 0)
    return parameters_bytes(shares, setting) + gradients_bytes(shares, setting) + optimizer_bytes(shares, setting)
