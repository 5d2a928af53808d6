"""What one microbatch does on one rank, unit by unit: memory, messages and ops. Plain data, torch-free.

A *unit* is a module that a pipeline stage owns completely. `OUTSIDE` stands for what the model's own forward does
before the first layer, which every stage repeats (masks, rotary tables). `LOSS` stands for what comes after the last
unit. A *segment* is the time during which one unit runs, forward or backward. Segments are recorded once (`tracing.py`)
and combined into steps of any number of microbatches, stages and schedules (`cost/training_step.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LOSS = "<loss>"
OUTSIDE = ""
LAYERS = "layers"
"""Of an outline: what all layers do."""


class Message(NamedTuple):
    """One collective or point-to-point message on one rank.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or recv.
        axis: the mesh axis of the group, "a*b" for a product of axes, or "world".
        ranks: the size of the group.
        bytes: size of the full tensor (the result of an all-gather, the input of a reduce-scatter).
        phase: "forward", "backward" or "step".
        received_bytes: of an all_to_all, what arrives from other ranks. remote_bytes: what it sends to other ranks,
            where its parts differ in size; -1: its even part of `bytes`.
    """

    op: str
    axis: str
    ranks: int
    bytes: int
    module: str
    phase: str
    received_bytes: int = 0
    remote_bytes: int = -1

    @property
    def sent_bytes(self) -> float:
        """The least that the rank itself must send (ring algorithms). Source: Thakur et al., IJHPCA 19(1), 2005."""
        if self.remote_bytes >= 0:
            return self.remote_bytes
        remote = (self.ranks - 1) / self.ranks if self.ranks else 0.0
        return self.bytes * {"all_reduce": 2 * remote, "send": 1.0, "recv": 0.0, "broadcast": 1.0}.get(self.op, remote)


class Kernel(NamedTuple):
    """One op: floating-point operations, bytes read and written, and whether it is a matmul or attention.

    attention: "forward" or "backward" of a matmul of attention; "" of any other. width: of a head, in attention.
    """

    flops: float
    bytes: float
    is_matmul: bool
    attention: str = ""
    width: int = 0

    @property
    def attention_flops(self) -> float:
        """Those of heads of 128 that take as long: each score costs an exponential, whatever the width."""
        return self.flops * (1 + SOFTMAX_WIDTH / max(self.width, 1)) / (1 + SOFTMAX_WIDTH / 128)


SOFTMAX_WIDTH = 48
"""What the exponential of a score costs in a fused attention kernel, in elements of its head: heads of 64 reach 0.79 of
the rate of heads of 128. An assumption, after FlashAttention-3, arXiv:2407.08608, sec. 3.2: exponentials run beside the
matmuls, at 1/512 of their rate."""


class Totals(NamedTuple):
    """Sums over ops: operations of linears, and of attention in each direction as of wide heads; bytes that matmuls and
    other ops move; launches of the host."""

    linear_flops: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    matmul_bytes: float = 0.0
    moved_bytes: float = 0.0
    launches: float = 0.0

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        return Totals(*(mine + its for mine, its in zip(self, other, strict=True)))


def totals_of(kernels: Sequence[Kernel], launches: float = 0.0) -> Totals:
    """The sums over ops. launches: 0: one for each."""
    flops = {"": 0.0, "forward": 0.0, "backward": 0.0}
    matmul_bytes = moved_bytes = 0.0
    for kernel in kernels:
        if kernel.is_matmul:
            flops[kernel.attention] += kernel.attention_flops if kernel.attention else kernel.flops
            matmul_bytes += kernel.bytes
        else:
            moved_bytes += kernel.bytes
    linear, forward, backward = flops.values()
    return Totals(linear, forward, backward, matmul_bytes, moved_bytes, launches or len(kernels))


class MemoryChange(NamedTuple):
    """Bytes allocated (positive) or freed (negative) at one moment: activations, and gradients that stay.

    Attributes:
        other_unit: set where one unit allocates and another one frees. For an allocation, the unit that frees it; for a
            release, the unit that allocated it. None for what a layer passes to the next layer, and for what travels
            between stages.
        freed_in: for an allocation with an `other_unit`, the action of the microbatch that frees it: 0 forward, 1
            backward (or dgrad), 2 wgrad, or `ABSENT` (see `segmenting.py`).
    """

    activations: int
    gradients: int
    other_unit: str | None = None
    freed_in: int = 0


@dataclass
class Segment:
    """One unit's time in one action of one microbatch.

    Attributes:
        freed_at_end: bytes that it allocated and that the end of the action frees.
        launches: ops that the host launches; 0: one for each of `kernels`.
    """

    unit: str
    changes: list[MemoryChange] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    freed_at_end: int = 0
    launches: float = 0.0

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)


@dataclass(frozen=True)
class StageBoundary:
    """What a stage that begins at a unit receives: (bytes, whether a gradient is sent back) of each tensor."""

    tensors: tuple[tuple[int, bool], ...] = ()

    @property
    def forward_bytes(self) -> int:
        return sum(size for size, _ in self.tensors)

    @property
    def backward_bytes(self) -> int:
        return sum(size for size, has_gradient in self.tensors if has_gradient)


@dataclass(frozen=True)
class MicrobatchSegments:
    """The segments of one microbatch in order of time. If backward was split, `backward` is dgrad and `wgrad` the
    rest."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    wgrad: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class MicrobatchTrace:
    """What was recorded of two microbatches.

    Attributes:
        first: a microbatch that allocates gradients. later: one that adds to them.
        boundaries: unit -> what travels to a stage that begins there.
        representatives: unit -> the unit that was recorded in its place (itself where it ran).
        regular: whether the next unit frees everything that a layer allocates in forward and does not save.
        expert_rows, expert_choices: the most rows that a call of experts over `ep` receives, with those of the rank
            itself, and the most choices that it computes for them.
        routers: units with a router of which the load-balancing loss reads sums -> the number of its experts.
        without_gradient: parameters of the units that ran which train and got no gradient, such as those that only
            choose tokens.
        skips: units whose output later stages use (`skips:` of a plan) -> what travels of it.
        freed_inputs: unit -> bytes of its input that its own forward frees, and that any does. A stage that begins at
            the unit stores its input until backward.
    """

    first: MicrobatchSegments
    later: MicrobatchSegments
    boundaries: dict[str, StageBoundary]
    representatives: dict[str, str]
    regular: bool = True
    expert_rows: int = 0
    expert_choices: int = 0
    routers: Mapping[str, int] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()
    skips: Mapping[str, StageBoundary] = field(default_factory=dict)
    freed_inputs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
