"""`parallelize profile`: measures one's own device, and writes the hardware profile that `explain` and `fit` read.

Matmuls of a few shapes, a copy, and many short ops are timed; under `torchrun` also an all_reduce over all ranks. From
these follow what is reached of the data sheet's peaks. What is not measured keeps the shipped profile's value, and says
so.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from parallelize.tools.analysis.cost.machine import Machine, load_machine, profile_of
from parallelize.tools.analysis.record.constants import constant

LARGE = ((8192, 4096, 14336), (8192, 8192, 8192), (4096, 4096, 4096))
SMALL = ((256, 512, 512), (512, 512, 512), (512, 256, 1024))
_ROUNDS, _SHORT_OPS = 5, 2000
_COPIED, _SENT = 1 << 30, 64 << 20  # bytes, of a GPU; of a CPU a sixteenth


def profile(path: Path, device: str | None = None, base: str | None = None) -> dict[str, float]:
    """Measure a device and write a profile to `path` on rank 0. Under `torchrun`, every rank calls it.

    Args:
        device: "cuda" or "cpu"; None: "cuda" where there is one.
        base: the shipped profile whose peaks are compared with; None: by the device's name.

    Returns: what was measured, by the key of the profile.

    Cost: seconds on a GPU; with several ranks, three all_reduces.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    name = base or (profile_of(torch.cuda.get_device_name()) if device == "cuda" else "cpu")
    machine = load_machine(name)
    found = {
        "memory_efficiency": _copy_rate(device) / machine.memory_bytes_per_s,
        "kernel_us": _launch_us(device),
    }
    found["matmul_efficiency"] = _matmul_rate(device, machine, found["memory_efficiency"]) / _peak(machine, device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        found["inside.efficiency"] = _link_rate(device) / machine.inside.bytes_per_s
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.write_text(_text(machine, found, device), encoding="utf-8")
    return found


def _peak(machine: Machine, device: str) -> float:
    return machine.peak_flops["bfloat16" if device == "cuda" else "float32"]


def _seconds(run: Callable[[], object], device: str) -> float:
    """The median of a few runs, after a first one."""
    times = []
    for _ in range(_ROUNDS + 1):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[_ROUNDS // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _copy_rate(device: str) -> float:
    """Bytes per second that a large copy reads and writes."""
    size = _COPIED if device == "cuda" else _COPIED // 16
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _launch_us(device: str) -> float:
    """Microseconds of the host for one short op."""
    x = torch.zeros(8, device=device)

    def run() -> None:
        for _ in range(_SHORT_OPS):
            x.add_(1.0)

    return _seconds(run, device) / _SHORT_OPS * 1e6


def _matmul_rate(device: str, machine: Machine, memory_efficiency: float) -> float:
    """Operations per second of large matmuls, without the time in which they move their operands: the median over
    shapes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moved = constant("matmul_bytes") / (machine.memory_bytes_per_s * memory_efficiency)
    rates = []
    for rows, inside, outside in LARGE if device == "cuda" else SMALL:
        a = torch.randn(rows, inside, device=device, dtype=dtype)
        b = torch.randn(inside, outside, device=device, dtype=dtype)
        seconds = _seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        size = (rows * inside + inside * outside + rows * outside) * a.element_size()
        rates.append(2.0 * rows * inside * outside / max(seconds - size * moved, 0.2 * seconds))
    return sorted(rates)[len(rates) // 2]


def _link_rate(device: str) -> float:
    """Bytes per second that each rank sends in a large all_reduce over all ranks."""
    data = torch.zeros((_SENT if device == "cuda" else _SENT // 16) // 4, device=device)
    seconds = _seconds(lambda: dist.all_reduce(data), device)
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * data.nbytes / seconds


def _text(machine: Machine, found: dict[str, float], device: str) -> str:
    """The profile as YAML: measured constants, and the others as shipped."""
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    where = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    values: dict[str, Any] = {"name": f"{machine.name}, measured"}
    for key, value in machine.constants.items():
        if key not in found and value == 0:
            continue
        source = f"measured by `parallelize profile` on {where}, {day}" if key in found else machine.sources[key]
        entry = {"value": float(f"{found.get(key, value):.4g}"), "source": source}
        first, _, second = key.partition(".")
        if second:
            values.setdefault(first, {})[second] = entry
        else:
            values[first] = entry
    return yaml.safe_dump(values, sort_keys=False, width=200)
