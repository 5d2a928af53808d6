"""Calibration: a short measurement of a group's link and a rank's matmuls, by which `overlap: auto` decides.

It runs once per group and dtype. All ranks measure together and use the mean, so that they make the same choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelize.comm.groups import Group
from parallelize.comm.link_profile import LinkProfile, known_peak
from parallelize.comm.meshes import tp_mesh
from parallelize.comm.p2p import Exchange
from parallelize.ops.matmul import chunked_matmul, symmetric_memory
from parallelize.ops.matmul.op_handshake import agree
from parallelize.ops.matmul.row_chunks import gather_rows

T = torch.Tensor
_ENOUGH_S = 0.008  # a measurement that takes this long is not repeated with more work
_REPEATS = 5
_CHUNKS = 4


def calibrate(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, profile: LinkProfile | None = None) -> LinkProfile:
    """Measure the mesh's `tp` axis now instead of in the first forward, or set its profile. Call it on every rank of
    the axis.

    Args:
        mesh: a mesh with an axis named `tp`, or a 1-D mesh.
        dtype: dtype of the matmuls.
        profile: used from now on, without a measurement. Pass the same on every rank.

    Returns: the profile that `overlap="auto"` uses for this axis and dtype, as long as its process group exists.
    Raises:
        MeshError: `no-tp-axis`.
        ShapeError: `ranks-disagree` if other ranks calibrate another dtype or call another op.
    Cost: about a quarter of a second of messages and matmuls the first time for a dtype; none afterwards, with
        `profile`, and on one rank.
    """
    group, device = Group(tp_mesh(mesh).get_group()), torch.device(mesh.device_type)
    if profile is not None:
        group.profiles[device.type, dtype] = profile
    return profile_of(group, dtype, device)


def profile_of(group: Group, dtype: torch.dtype, device: torch.device) -> LinkProfile:
    """The profile that was set or measured before, or one that is measured now, as a collective of about 0.25 s."""
    key = (device.type, dtype)
    if group.size == 1:
        return LinkProfile(0.0, float("inf"), float("inf"), 0.0)
    if key not in group.profiles:
        agree(group, device, f"calibrate {dtype} {device.type}")
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            group.profiles[key] = _measure(group, dtype, device)
    return group.profiles[key]


def _measure(group: Group, dtype: torch.dtype, device: torch.device) -> LinkProfile:
    with group.not_recording():
        exchange = _exchanger(group, dtype, device)
        latency = _mean(group, _time(exchange(16), device))
        elements, exchange_s = _grow(group, exchange, 1 << 15, device)
        sent_bytes = elements * dtype.itemsize * (group.size - 1)
        bytes_per_s = sent_bytes / max(exchange_s - latency, exchange_s / 10)
        side, matmul_s = _grow(group, _matmul(dtype, device), 128, device, 1 << 12)
        flops = 2 * side**3 / matmul_s
        hidden = _hidden(group, dtype, device, bytes_per_s, flops)
        return LinkProfile(latency * 1e6, bytes_per_s, flops, latency * 1e6, hidden)


def _hidden(
    group: Group, dtype: torch.dtype, device: torch.device, bytes_per_s: float, flops: float
) -> dict[str, float]:
    """The fraction of communication that each algorithm hides: its gain over sync, measured alternately.

    The measured matmul takes about as long as its messages, or longer if the link is fast, so that it is like a real
    one.
    """
    features = 512
    outs = round(features * dtype.itemsize * flops / bytes_per_s / (2 * features) * (group.size - 1) / group.size)
    outs = min(max(outs, 256), 4096)
    per_row = max(2 * features * outs / flops, features * dtype.itemsize / bytes_per_s)
    rows = min(max(int(0.02 / per_row), 64 * group.size), 8192) // group.size * group.size
    local = torch.ones(rows // group.size, features, dtype=dtype, device=device)
    right = torch.ones(features, outs, dtype=dtype, device=device)

    def run(steps: int) -> Callable[[], object]:
        return lambda: chunked_matmul.all_gather_matmul(local, [right], [None], 0, rows, group, steps=steps)

    full = local.new_empty((rows, features))
    runs = {
        "sync": run(0),
        "chunked": run(_CHUNKS),
        "link": lambda: gather_rows(local, 0, rows, group),
        "compute": lambda: full @ right,
    }
    if not symmetric_memory.unavailable(group, device):
        runs["symm_mem"] = lambda: symmetric_memory.all_gather_matmul(local, [right], [None], 0, rows, group)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_REPEATS):
        for name, function in runs.items():
            seconds[name].append(_once(function, device))
    mean = {name: _mean(group, median(times)) for name, times in seconds.items()}
    return {name: _hidden_fraction(name, mean, group.size) for name in ("chunked", "symm_mem") if name in mean}


def _hidden_fraction(name: str, mean: dict[str, float], size: int) -> float:
    longer, shorter = max(mean["link"], mean["compute"]), min(mean["link"], mean["compute"])
    # the last chunk's matmul always follows the last message; this is not a failure to hide
    last = mean["compute"] * (size - 1) / size / _CHUNKS if name == "chunked" else 0.0
    last = max(0.0, mean["link"] + last - longer)
    return min(1.0, max(0.0, (mean["sync"] - mean[name] + last) / shorter))


def _exchanger(group: Group, dtype: torch.dtype, device: torch.device) -> Callable[[int], Callable[[], None]]:
    """Builds functions that send a number of elements to each peer."""

    def sending(elements: int) -> Callable[[], None]:
        sent = torch.ones(elements, dtype=dtype, device=device)
        received = {rank: torch.empty_like(sent) for rank in range(group.size) if rank != group.rank}

        def run() -> None:
            with Exchange(group) as exchange:
                exchange.post(dict.fromkeys(received, sent), received)

        return run

    return sending


def _matmul(dtype: torch.dtype, device: torch.device) -> Callable[[int], Callable[[], None]]:
    """Builds functions that multiply square matrices."""

    def multiplying(side: int) -> Callable[[], None]:
        left = torch.ones(side, side, dtype=dtype, device=device)
        out = torch.empty_like(left)

        def run() -> None:
            torch.mm(left, left, out=out)

        return run

    return multiplying


def _grow(
    group: Group, work: Callable[[int], Callable[[], None]], size: int, device: torch.device, largest: int = 1 << 23
) -> tuple[int, float]:
    """(size, seconds) of the first size, doubling, whose work takes long enough to measure."""
    while True:
        seconds = _mean(group, _time(work(size), device))
        if seconds >= _ENOUGH_S or size >= largest:
            return size, seconds
        size *= 2


def _time(function: Callable[[], object], device: torch.device) -> float:
    function()
    return median(_once(function, device) for _ in range(_REPEATS))


def _once(function: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _mean(group: Group, seconds: float) -> float:
    """The mean over ranks, equal on all of them because it is added in rank order."""
    local = torch.tensor([seconds], dtype=torch.float64)
    device = torch.device("cpu")
    if not group.backend(device) or group.backend(device) in ("nccl", "xccl"):
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    local = local.to(device)
    by_rank = {rank: torch.empty_like(local) for rank in range(group.size) if rank != group.rank}
    with Exchange(group) as exchange:
        exchange.post(dict.fromkeys(by_rank, local), by_rank)
    by_rank[group.rank] = local
    return sum(by_rank[rank].item() for rank in range(group.size)) / group.size


def peak_flops(device_type: str, dtype: torch.dtype, size: int = 1024, rounds: int = 20) -> float:
    """Floating-point operations per second of one device, of which model-FLOP utilization is a fraction.

    The vendor's figure if it is known, else the best measured matmul. On a CPU it depends on torch's number of threads.
    """
    if device_type == "cuda":
        peak = known_peak(torch.cuda.get_device_name(), str(dtype).removeprefix("torch."))
        if peak is not None:
            return peak
    a = torch.randn(size, size, device=device_type).to(dtype)
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        torch.mm(a, a)
        if device_type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
