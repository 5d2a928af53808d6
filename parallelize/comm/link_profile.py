"""Speed of a device and its network, and the predicted time of an overlapped linear. Torch-free.

A profile is measured (`parallelize.ops.matmul.calibrate`) or provided by the user. The predicted time of an op:

    sync     = communication + compute
    chunked  = max(communication + compute of the first or last chunk, compute + overhead) + what overlap fails to hide
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

CHUNKS = (2, 4, 8, 16)
MARGIN = 0.01  # overlap is chosen only if it saves at least this fraction of sync


@dataclass(frozen=True)
class LinkProfile:
    """Speed of one group of ranks, for one device type and dtype: what `overlap="auto"` decides by.

    Args:
        latency_us: microseconds of one small exchange with every peer.
        bytes_per_s: bytes per second that a rank sends to all its peers together, and receives at the same time.
        flops: floating-point operations per second of one rank's matmuls, without communication.
        step_us: microseconds of host time that each additional chunk costs.
        hidden: fraction of the communication that is hidden behind compute, from 0 to 1, by algorithm ("chunked" or
            "symm_mem"). An algorithm that is missing is never chosen.
    """

    latency_us: float
    bytes_per_s: float
    flops: float
    step_us: float
    hidden: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name: plain values that `json` can write."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> LinkProfile:
        """The profile whose `as_dict()` is `values`. Raises: TypeError for unknown or missing fields."""
        return LinkProfile(**values)


@dataclass(frozen=True)
class LinearWork:
    """What one call of an overlapped linear does on one rank.

    Args:
        sent_bytes: bytes sent to all peers together, over all phases.
        flops: floating-point operations of all its matmuls.
        exposed: fraction of `flops` that cannot be overlapped without chunks, because it must finish before the first
            message or can start only after the last one.
        phases: number of sequential phases of communication, each with its own latency.
    """

    sent_bytes: float
    flops: float
    exposed: float
    phases: int = 1


@dataclass(frozen=True)
class AlgorithmChoice:
    """An algorithm ("sync", "chunked/8", "symm_mem") and the reason for it, with predicted milliseconds."""

    algorithm: str
    reason: str


def choose(work: LinearWork, profile: LinkProfile) -> AlgorithmChoice:
    """The algorithm with the least predicted time; `sync` unless another one is faster by `MARGIN`."""
    compute = work.flops / profile.flops * 1e3
    link = work.sent_bytes / profile.bytes_per_s * 1e3 + work.phases * profile.latency_us / 1e3
    sync = compute + link
    best, algorithm = sync, "sync"
    for candidate, milliseconds in _candidates(work, profile, compute, link):
        if milliseconds < best:
            best, algorithm = milliseconds, candidate
    summary = f"communication {link:.2f} ms, compute {compute:.2f} ms: sequentially {sync:.2f} ms, "
    if best > sync * (1 - MARGIN):
        other = f"{algorithm} {best:.2f} ms" if algorithm != "sync" else "not less with overlap"
        return AlgorithmChoice("sync", summary + other)
    return AlgorithmChoice(algorithm, f"{summary}{algorithm} {best:.2f} ms")


def _candidates(work: LinearWork, profile: LinkProfile, compute: float, link: float) -> Iterator[tuple[str, float]]:
    """(algorithm, milliseconds) of each algorithm that the profile knows."""
    for backend, hidden in profile.hidden.items():
        visible = (1 - hidden) * min(compute, link)
        if backend != "chunked":
            yield backend, max(compute, link) + visible
            continue
        for chunks in CHUNKS:
            exposed = compute * work.exposed / chunks
            tail = link * (work.phases - 1) / work.phases / chunks
            overhead = chunks * work.phases * profile.step_us / 1e3
            yield f"chunked/{chunks}", max(link + exposed, compute + tail) + visible + overhead


def gather_work(rows: int, inner: int, outs: int, size: int, item_bytes: int) -> LinearWork:
    """All-gather `rows` rows of `inner` features (the full number of rows), times a local weight to `outs` features."""
    remote = (size - 1) / size
    return LinearWork(rows * inner * item_bytes * remote, 2.0 * rows * inner * outs, remote)


def scatter_work(rows: int, inner: int, outs: int, size: int, item_bytes: int) -> LinearWork:
    """`rows` rows of `inner` local features times a local weight to `outs` features, reduce-scattered."""
    remote = (size - 1) / size
    return LinearWork(rows * outs * item_bytes * remote, 2.0 * rows * inner * outs, remote)


def reduce_work(rows: int, inner: int, outs: int, size: int, item_bytes: int) -> LinearWork:
    """`rows` rows of `inner` local features times a local weight to `outs` features, all-reduced."""
    remote = (size - 1) / size
    return LinearWork(2 * rows * outs * item_bytes * remote, 2.0 * rows * inner * outs, 1.0, phases=2)


PEAK_FLOPS: dict[str, dict[str, float]] = {
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12},
}
"""Dense peak of one device in floating-point operations per second, by words of its name. [vendor data sheets]"""


def known_peak(name: str, dtype: str) -> float | None:
    """The vendor's figure for a device of this name; None if it is not listed."""
    devices = [device for device in PEAK_FLOPS if all(word in name for word in device.split())]
    return PEAK_FLOPS[max(devices, key=len)].get(dtype) if devices else None
