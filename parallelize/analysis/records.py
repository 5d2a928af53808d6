"""What one microbatch does on one rank, unit by unit: memory, messages, work. Plain data, torch-free.

A *unit* is a module that a pipeline stage owns whole; "" stands for what the model's own forward does before the first
layer, and does on every stage (masks, rotary tables); `LOSS` for what comes after it. A *segment* is the time during which one unit runs, forward or backward. Segments are recorded once
(`tracing.py`) and put together into steps of any depth, stages and schedule (`step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

LOSS = "<loss>"
OUTSIDE = ""


class Message(NamedTuple):
    """One collective or point-to-point message on one rank.

    op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or recv. axis: of the mesh, "a*b" for a product,
    "world". ranks: of its group. bytes: of the whole tensor (what an all-gather ends with, a reduce-scatter begins with).
    """

    op: str
    axis: str
    ranks: int
    bytes: int
    module: str
    phase: str  # "forward", "backward", "step"

    @property
    def sent_bytes(self) -> float:
        """What the rank itself must send at the least: ring algorithms. Source: Thakur et al., IJHPCA 19(1), 2005."""
        remote = (self.ranks - 1) / self.ranks if self.ranks else 0.0
        return self.bytes * {"all_reduce": 2 * remote, "send": 1.0, "recv": 0.0, "broadcast": 1.0}.get(self.op, remote)


class Kernel(NamedTuple):
    """One op: floating-point operations, bytes read and written, whether it is a product of matrices."""

    flops: float
    bytes: float
    product: bool


class Change(NamedTuple):
    """Bytes that come or go at one moment: activations, and gradients that stay.

    other: where what is made in one unit goes in another, the other end: for bytes that come the unit in which they go, in
    action `place` of the microbatch (0: forward, 1: backward or its first half, 2: its second half); for bytes that go the
    unit in which they were made. What a layer makes for the next one, and what travels between stages, has none.
    """

    activations: int
    gradients: int
    other: str | None = None
    place: int = 0


@dataclass
class Segment:
    """One unit's time in one pass of one microbatch. late: bytes that it made and that go when the action has ended."""

    unit: str
    changes: list[Change] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    late: int = 0

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)


@dataclass(frozen=True)
class Boundary:
    """What a stage would pass on before a unit: (bytes, whether a gradient comes back) of each tensor."""

    tensors: tuple[tuple[int, bool], ...] = ()

    @property
    def forward_bytes(self) -> int:
        return sum(size for size, _ in self.tensors)

    @property
    def backward_bytes(self) -> int:
        return sum(size for size, wanted in self.tensors if wanted)


@dataclass(frozen=True)
class Pass:
    """One microbatch: its segments in order of time. `weights`: the second half of a backward that was split."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    weights: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A microbatch whose gradients are new, one that adds to them, and what travels between stages.

    Attributes:
        likenesses: unit -> the unit that was recorded in its place (itself where it ran).
        regular: what a layer makes in forward goes by the next unit.
    """

    first: Pass
    later: Pass
    boundaries: dict[str, Boundary]
    likenesses: dict[str, str]
    regular: bool = True
