"""One step under a profiler: time in collectives by axis, imbalance of ranks, and a timeline with module names.

A dispatch mode sees each collective with its group, and the profiler times it under the name of its backend
(`gloo:all_reduce`, `nccl:...`). The n-th call of the one is the n-th event of the other: both are in order of the
calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private.torch_tensors import TorchDispatchMode
from parallelize.comm.mesh_view import MeshView

_MODULE = "module "
_RECEIVES = "recv"  # they are posted before their sender has begun, so that their time is that of the sender
_TIMED = ("gloo:", "nccl:")
MOST_SPANS = 4000


@dataclass
class ProfiledStep:
    """What one step of this rank did.

    Attributes:
        by_axis: axis to seconds in which a collective of it was in flight, waiting for others included, and for
            receives excluded.
        busy_s: what this rank computed: the time of its thread on a CPU, of its kernels on a GPU.
        spans: (row, name, start, stop) in seconds: modules by depth, and collectives.
        largest: of each axis, the rank with the most. imbalance: busy time of the slowest rank over the mean, less 1.
    """

    step_s: float = 0.0
    busy_s: float = 0.0
    by_axis: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    imbalance: float = 0.0

    def scalars(self) -> dict[str, float]:
        """Tagged numbers for the loggers."""
        axes = {f"comm_{axis}_ms": seconds * 1e3 for axis, seconds in self.largest.items()}
        return {**axes, "imbalance": self.imbalance}


class _Groups(TorchDispatchMode):
    """Notes the axis of each collective, in order."""

    def __init__(self, axes: dict[str, str]):
        super().__init__()
        self.axes = axes
        self.collectives: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.collectives.append((func.name(), self._axis(args, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _axis(self, args: Any, kwargs: Any) -> str:
        for value in (*args, *kwargs.values()):
            name = value if isinstance(value, str) else getattr(value, "group_name", None)
            if name is None and type(value).__name__ == "ScriptObject":
                name = _name_of(value)
            if isinstance(name, str) and name in self.axes:
                return self.axes[name]
        return "other"


def _name_of(boxed: Any) -> str | None:
    """The name of a process group that was passed to an op."""
    try:
        return dist.ProcessGroup.unbox(boxed).group_name
    except (AttributeError, RuntimeError, TypeError):
        return None


def axes_by_group(mesh: DeviceMesh) -> dict[str, str]:
    """Name of a process group to the axes along which its ranks differ, such as `dp*cp`; of all ranks, `world`."""
    if not dist.is_initialized():
        return {}
    view = MeshView.of(mesh)
    ranks_of = {group.group_name: dist.get_process_group_ranks(group) for group in private_groups.known_groups()}
    return {name: "*".join(view.axes_along(ranks)) or "world" for name, ranks in ranks_of.items()}


@contextmanager
def profiled(module: nn.Module, mesh: DeviceMesh) -> Iterator[ProfiledStep]:
    """Profile what runs inside; the result is filled at the end. Cost: the step takes up to twice as long."""
    result, groups = ProfiledStep(), _Groups(axes_by_group(mesh))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if mesh.device_type == "cuda" else [])]
    with _named_modules(module), profile(activities=activities) as profiler, groups, record_function("step"):
        began = time.thread_time()
        yield result
        result.busy_s = time.thread_time() - began
    _fill(result, list(profiler.events() or []), groups.collectives)


@contextmanager
def _named_modules(module: nn.Module) -> Iterator[None]:
    """Each module's forward is a range of the profile, by its name."""
    handles, open_ranges = [], []

    def begin(name: str) -> Any:
        def hook(*_: Any) -> None:
            entered = record_function(_MODULE + name)
            entered.__enter__()
            open_ranges.append(entered)

        return hook

    def end(*_: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    for name, inner in module.named_modules():
        if name:
            handles.append(inner.register_forward_pre_hook(begin(name)))
            handles.append(inner.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fill(result: ProfiledStep, events: list[Any], calls: list[tuple[str, str]]) -> None:
    step = next((event for event in events if event.name == "step"), None)
    began = step.time_range.start if step is not None else 0.0
    result.step_s = step.time_range.elapsed_us() / 1e6 if step is not None else 0.0
    # a GPU has an event of the same name for each of the host's
    timed = [event for event in events if event.name.startswith(_TIMED) and event.device_type == DeviceType.CPU]
    timed.sort(key=lambda event: event.time_range.start)
    matched = len(timed) == len(calls)
    intervals: dict[str, list[tuple[float, float]]] = {}
    for number, event in enumerate(timed):
        axis = calls[number][1] if matched else "all"
        _span(result, axis, event.name, event, began)
        if _RECEIVES not in event.name:
            start = event.time_range.start
            length_us = getattr(event, "device_time_total", 0.0) or event.time_range.elapsed_us()
            intervals.setdefault(axis, []).append((start, start + length_us))
    result.by_axis = {axis: covered(pairs) / 1e6 for axis, pairs in intervals.items()}
    if kernels_us := sum(e.device_time_total for e in events if _is_compute_kernel(e)):
        result.busy_s = kernels_us / 1e6
    for event in events:
        if event.name.startswith(_MODULE) and event.device_type == DeviceType.CPU:
            name = event.name.removeprefix(_MODULE)
            _span(result, f"modules {name.count('.')}", name, event, began)


def _is_compute_kernel(event: Any) -> bool:
    """Whether an event is a kernel on a GPU, not one of NCCL, and not a range that the host has named."""
    is_named = getattr(event, "is_user_annotation", False) or event.name == "step" or event.name.startswith(_MODULE)
    return event.device_type != DeviceType.CPU and "nccl" not in event.name and not is_named


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _span(result: ProfiledStep, row: str, name: str, event: Any, began: float) -> None:
    if len(result.spans) < MOST_SPANS:
        result.spans.append((row, name, (event.time_range.start - began) / 1e6, (event.time_range.end - began) / 1e6))


def compare_ranks(result: ProfiledStep) -> None:
    """Fill `largest` and `imbalance` from all ranks. A collective."""
    values: list[Any] = [(result.busy_s, result.by_axis)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, (result.busy_s, result.by_axis))
    busy = [seconds for seconds, _ in values]
    mean = sum(busy) / len(busy)
    result.imbalance = max(busy) / mean - 1.0 if mean > 0 else 0.0
    for _, by_axis in values:
        for axis, seconds in by_axis.items():
            result.largest[axis] = max(result.largest.get(axis, 0.0), seconds)
