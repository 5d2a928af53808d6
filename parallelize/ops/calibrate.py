"""A short measurement of a group's link and a rank's matmuls: what `overlap: auto` decides by. Once a group and dtype.

All ranks measure together and agree on the mean, so that they decide alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelize.groups import Group, tp_mesh
from parallelize.hardware import LinkProfile, known_peak
from parallelize.ops import pipeline, symmetric
from parallelize.ops.agreement import agree
from parallelize.ops.exchange import Exchange

T = torch.Tensor
_ENOUGH_S = 0.008  # a measurement that takes this long is not repeated with more work
_REPEATS = 5
_PIECES = 4


def calibrate(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, profile: LinkProfile | None = None) -> LinkProfile:
    """Measure the mesh's `tp` axis now, rather than at the first forward, or give what is known of it.

    Args:
        dtype: of the matmuls.
        profile: used as it is from now on; nothing is measured. Give the same on every rank.
    """
    group, device = Group(tp_mesh(mesh).get_group()), torch.device(mesh.device_type)
    if profile is not None:
        group.profiles[device.type, dtype] = profile
    return profile_of(group, dtype, device)


def profile_of(group: Group, dtype: torch.dtype, device: torch.device) -> LinkProfile:
    """The profile that was given or measured before, or one measured now: a collective of about a quarter of a second."""
    key = (device.type, dtype)
    if group.size == 1:
        return LinkProfile(0.0, float("inf"), float("inf"), 0.0)
    if key not in group.profiles:
        agree(group, device, f"calibrate {dtype} {device.type}")
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            group.profiles[key] = _measure(group, dtype, device)
    return group.profiles[key]


def _measure(group: Group, dtype: torch.dtype, device: torch.device) -> LinkProfile:
    kept, group.traffic = group.traffic, None
    try:
        exchange = _exchanger(group, dtype, device)
        latency = _mean(group, _time(exchange(16), device))
        sent, taken = _grow(group, exchange, 1 << 15, device)
        sent_bytes = sent * dtype.itemsize * (group.size - 1)
        link = sent_bytes / max(taken - latency, taken / 10)
        side, matmul_s = _grow(group, _matmul(dtype, device), 128, device, 1 << 12)
        flops = 2 * side**3 / matmul_s
        hidden = _hidden(group, dtype, device, link, flops)
        return LinkProfile(latency * 1e6, link, flops, latency * 1e6, hidden)
    finally:
        group.traffic = kept


def _hidden(group: Group, dtype: torch.dtype, device: torch.device, link: float, flops: float) -> dict[str, float]:
    """How much of the communication each backend hides: what it gains over sync, side by side, on a product that takes
    about as long as its messages (longer where the link is fast, so that it is a product like those to come)."""
    features = 512
    outs = round(features * dtype.itemsize * flops / link / (2 * features) * (group.size - 1) / group.size)
    outs = min(max(outs, 256), 4096)
    per_row = max(2 * features * outs / flops, features * dtype.itemsize / link)
    rows = min(max(int(0.02 / per_row), 64 * group.size), 8192) // group.size * group.size
    own = torch.ones(rows // group.size, features, dtype=dtype, device=device)
    right = torch.ones(features, outs, dtype=dtype, device=device)

    def run(steps: int) -> Callable[[], object]:
        return lambda: pipeline.gather_products(own, [right], [None], 0, rows, group, steps)

    whole = own.new_empty((rows, features))
    runs = {
        "sync": run(0),
        "chunked": run(_PIECES),
        "link": lambda: pipeline.gather_rows(own, 0, rows, group),
        "compute": lambda: whole @ right,
    }
    if not symmetric.unavailable(group, device):
        runs["symm_mem"] = lambda: symmetric.gather_products(own, [right], [None], 0, rows, group)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_REPEATS):
        for name, function in runs.items():
            taken[name].append(_once(function, device))
    mean = {name: _mean(group, median(times)) for name, times in taken.items()}
    least = min(mean["link"], mean["compute"])
    hidden = {}
    for name in ("chunked", "symm_mem"):
        if name in mean:
            ideal = max(mean["link"], mean["compute"])
            edge = mean["compute"] * (group.size - 1) / group.size / _PIECES if name == "chunked" else 0.0
            edge = max(0.0, mean["link"] + edge - ideal)  # what the last piece adds, which is no fault of hiding
            hidden[name] = min(1.0, max(0.0, (mean["sync"] - mean[name] + edge) / least))
    return hidden


def _exchanger(group: Group, dtype: torch.dtype, device: torch.device) -> Callable[[int], Callable[[], None]]:
    """What sends so many elements to each peer."""

    def of(elements: int) -> Callable[[], None]:
        sent = torch.ones(elements, dtype=dtype, device=device)
        received = {rank: torch.empty_like(sent) for rank in range(group.size) if rank != group.rank}

        def run() -> None:
            with Exchange(group) as link:
                link.post(dict.fromkeys(received, sent), received)

        return run

    return of


def _matmul(dtype: torch.dtype, device: torch.device) -> Callable[[int], Callable[[], None]]:
    def of(side: int) -> Callable[[], None]:
        left = torch.ones(side, side, dtype=dtype, device=device)
        out = torch.empty_like(left)

        def run() -> None:
            torch.mm(left, left, out=out)

        return run

    return of


def _grow(
    group: Group, work: Callable[[int], Callable[[], None]], size: int, device: torch.device, most: int = 1 << 23
) -> tuple[int, float]:
    """The first size (doubling) whose work takes long enough to measure, and the seconds it takes."""
    while True:
        taken = _mean(group, _time(work(size), device))
        if taken >= _ENOUGH_S or size >= most:
            return size, taken
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
    """Over the ranks, the same on each: added in rank order."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    device = torch.device("cpu")
    if not group.backend(device) or group.backend(device) in ("nccl", "xccl"):
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    mine = mine.to(device)
    others = {rank: torch.empty_like(mine) for rank in range(group.size) if rank != group.rank}
    with Exchange(group) as link:
        link.post(dict.fromkeys(others, mine), others)
    others[group.rank] = mine
    return sum(others[rank].item() for rank in range(group.size)) / group.size


def peak_flops(device_type: str, dtype: torch.dtype, size: int = 1024, rounds: int = 20) -> float:
    """Floating-point operations a second of one device: the vendor's figure where it is known, else the best product seen.

    What model-FLOP utilisation is a share of. On a CPU it is measured, with the threads that torch has now.
    """
    if device_type == "cuda":
        known = known_peak(torch.cuda.get_device_name(), str(dtype).removeprefix("torch."))
        if known is not None:
            return known
    a = torch.randn(size, size, device=device_type).to(dtype)
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        torch.mm(a, a)
        if device_type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
