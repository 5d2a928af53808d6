"""What a machine and its network can do, as numbers; and what an overlapped linear would take on them.

A profile is measured (`parallelize.ops.calibrate`) or given. The model of a pipelined op:

    sync     = communication + compute
    chunked  = max(communication + the first or last piece's compute, compute + overhead) + what overlap fails to hide

Floor 0: torch-free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

PIECES = (2, 4, 8, 16)
MARGIN = 0.01  # overlap has to promise at least so much, as a share of sync


@dataclass(frozen=True)
class LinkProfile:
    """One group of ranks, one device type, one dtype.

    Args:
        latency_us: of one small exchange with every peer.
        bytes_per_s: that a rank sends (and receives, at the same time) to all its peers together.
        flops: floating-point operations a second of one rank's matmuls, without communication.
        step_us: host time that one more piece costs.
        hidden: backend to the share of communication that it hides behind compute, between 0 and 1.
    """

    latency_us: float
    bytes_per_s: float
    flops: float
    step_us: float
    hidden: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> LinkProfile:
        return LinkProfile(**values)


@dataclass(frozen=True)
class Work:
    """What one call does on one rank.

    Args:
        sent_bytes: to all peers together, over all phases.
        flops: of all its products.
        exposed: share of `flops` that cannot run beside communication if there are no pieces: what must be there before
            the first message can go, or can start only after the last.
        phases: one after another, each with its latency.
    """

    sent_bytes: float
    flops: float
    exposed: float
    phases: int = 1


@dataclass(frozen=True)
class Choice:
    """A way ("sync", "chunked/8", "symm_mem") and the reason for it, in words and milliseconds."""

    way: str
    why: str


def choose(work: Work, profile: LinkProfile) -> Choice:
    """The way that promises the least time; `sync` unless another one is better by `MARGIN`."""
    compute = work.flops / profile.flops * 1e3
    link = work.sent_bytes / profile.bytes_per_s * 1e3 + work.phases * profile.latency_us / 1e3
    sync = compute + link
    best, way = sync, "sync"
    for candidate, milliseconds in _candidates(work, profile, compute, link):
        if milliseconds < best:
            best, way = milliseconds, candidate
    said = f"communication {link:.2f} ms, compute {compute:.2f} ms: in turn {sync:.2f} ms, "
    if best > sync * (1 - MARGIN):
        return Choice("sync", said + (f"{way} {best:.2f} ms" if way != "sync" else "overlap no less"))
    return Choice(way, said + f"{way} {best:.2f} ms")


def _candidates(work: Work, profile: LinkProfile, compute: float, link: float):
    for backend, hidden in profile.hidden.items():
        visible = (1 - hidden) * min(compute, link)
        if backend != "chunked":
            yield backend, max(compute, link) + visible
            continue
        for pieces in PIECES:
            edge = compute * work.exposed / pieces
            tail = link * (work.phases - 1) / work.phases / pieces
            steps = pieces * work.phases * profile.step_us / 1e3
            yield f"chunked/{pieces}", max(link + edge, compute + tail) + visible + steps


def gather_work(rows: int, inner: int, outs: int, size: int, item_bytes: int) -> Work:
    """`rows` full rows of `inner` features, gathered, times a local weight of `outs` features."""
    remote = (size - 1) / size
    return Work(rows * inner * item_bytes * remote, 2.0 * rows * inner * outs, remote)


def scatter_work(rows: int, inner: int, outs: int, size: int, item_bytes: int) -> Work:
    """`rows` full rows of `inner` local features times a weight to `outs` features, summed and scattered."""
    remote = (size - 1) / size
    return Work(rows * outs * item_bytes * remote, 2.0 * rows * inner * outs, remote)


def reduce_work(rows: int, inner: int, outs: int, size: int, item_bytes: int) -> Work:
    """The same, summed on every rank."""
    remote = (size - 1) / size
    return Work(2 * rows * outs * item_bytes * remote, 2.0 * rows * inner * outs, 1.0, phases=2)


PEAK_FLOPS: dict[str, dict[str, float]] = {
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12},
}
"""Dense peak of one device, floating-point operations a second, by a part of its name. [vendor data sheets]"""


def known_peak(name: str, dtype: str) -> float | None:
    """The vendor's figure for a device of this name; None where it is not known here."""
    found = [part for part in PEAK_FLOPS if all(word in name for word in part.split())]
    return PEAK_FLOPS[max(found, key=len)].get(dtype) if found else None
