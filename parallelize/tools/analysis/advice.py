"""Single changes that would make a setting fit, or faster. Each is computed like the setting itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallelize.base.errors import ParallelizeError
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.measure import measure
from parallelize.tools.analysis.show.explanation import Advice, Explanation
from parallelize.tools.analysis.subject import Subject, check

MIN_SAVING = 0.02  # a change that saves a smaller fraction of time or memory is not listed
MAX_CHANGES = 6


def advise(subject: Subject, setting: Setting, machine: Machine, now: Explanation) -> list[Advice]:
    """The effect of single changes: first those that make the setting fit, then those that save time, then memory.

    now: the explanation of `setting`.
    """
    ranked = []
    for change, changed_setting in changes(setting):
        outcome = outcome_of(subject, changed_setting, machine)
        if outcome is not None:
            ranked.append(_ranked_advice(change, *outcome, now))
    listed = [pair for pair in ranked if pair is not None]
    return [advice for _, advice in sorted(listed, key=lambda pair: pair[0])[:MAX_CHANGES]]


def _ranked_advice(change: str, seconds: float, peak: int, now: Explanation) -> tuple[tuple[int, float], Advice] | None:
    """(sort key, advice); None where the change does not help enough."""
    time = seconds / now.time.overlapped_s
    memory = peak / now.peak_bytes
    gain = f"step {_percent(time)}, peak {_percent(memory)} ({peak / 1e9:.1f} GB)"
    fits = peak < now.machine_memory_bytes
    if not now.fits:
        if memory > 1 - MIN_SAVING:
            return None
        key = (0 if fits else 1, time if fits else memory)
        return key, Advice(change, gain + ("; then it fits" if fits else "; still too large"), seconds, peak)
    if not fits or (time > 1 - MIN_SAVING and (memory > 0.8 or time > 1.1)):
        return None
    return (2 if time <= 1 - MIN_SAVING else 3, time), Advice(change, gain, seconds, peak)


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.0f}%"


def outcome_of(subject: Subject, setting: Setting, machine: Machine) -> tuple[float, int] | None:
    """(seconds of the overlapped bound, largest peak); None where the setting is refused."""
    try:
        check(subject, setting)
        _, memories, time = measure(subject, setting, machine, by_segment=False)
    except ParallelizeError:
        return None
    return time.overlapped_s, max(memory.peak for memory in memories)


def changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """(options of the command line, setting) of single changes that keep the tokens of a step."""
    has_tp = setting.size("tp") > 1
    options: list[tuple[str, dict[str, Any]]] = []
    if has_tp and not setting.sequence_parallel:
        options.append(("--sequence-parallel", {"sequence_parallel": True}))
    if has_tp and not setting.loss_parallel:
        options.append(("--loss-parallel", {"loss_parallel": True}))
    if has_tp and not setting.sequence_parallel and not setting.loss_parallel:
        options.append(("--sequence-parallel --loss-parallel", {"sequence_parallel": True, "loss_parallel": True}))
    if setting.size(setting.shard_axis) > 1:
        options += [(f"--zero {stage}", {"zero": stage}) for stage in (1, 2, 3) if stage != setting.zero]
    if setting.recompute == "off":
        options.append(("--recompute full", {"recompute": "full"}))
        options.append(("--recompute selective", {"recompute": "selective"}))
    else:
        options.append(("--recompute off", {"recompute": "off"}))
    if setting.dtype is None and setting.weights_dtype == "float32":
        options.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if has_tp and setting.overlap == "off":
        options.append(("--overlap auto", {"overlap": "auto"}))
    if setting.microbatch_size > 1:
        options.append((f"--num-microbatches {setting.batch}", {"num_microbatches": setting.batch}))
    if setting.size("pp") > 1 and setting.schedule == "1f1b":
        options.append(("--schedule interleaved_1f1b", {"schedule": "interleaved_1f1b"}))
        options.append(("--schedule zbv", {"schedule": "zbv"}))
    for text, change in options:
        yield text, replace(setting, **change)
