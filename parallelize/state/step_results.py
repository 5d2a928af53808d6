"""What the steps of the application leave on a module, as far as rooms below the step read it.

The classes themselves are in the rooms of their steps, above this one. There `expected` gives a field of the record
back as the class that the step has set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import MeshView
from parallelize.state.pending_reductions import PendingReductions

C = TypeVar("C")


class ParameterSlot(Protocol):
    """An `applied.parameters.Slot`. shared: (dim, start, stop, multiplicity) of what other tp ranks store too."""

    key: str
    shared: tuple[tuple[int, int, int, int], ...]
    tied: bool
    pending_reductions: PendingReductions

    def forget(self) -> None: ...

    def prepare(self, parameters: dict[str, Any]) -> None: ...

    def local(self, parameters: dict[str, Any]) -> torch.Tensor: ...


class PlannedModule(Protocol):
    """What a planned module runs with: a `tensor.planned_forward.ModuleRuntime`."""

    @property
    def slots(self) -> Iterable[ParameterSlot]: ...

    @property
    def weight(self) -> ParameterSlot | None: ...

    @property
    def bias(self) -> ParameterSlot | None: ...


class CallSiteOfPlan(Protocol):
    """A call site as the plan defines it: of which module, for which op, with which request."""

    @property
    def fqn(self) -> str: ...

    @property
    def op(self) -> str: ...

    @property
    def requested(self) -> str: ...


class CountedCallSite(Protocol):
    """A call site where a collective overlaps with matmuls, and its counts: a `tensor.overlap_sites.CallSite`."""

    calls: int
    overlapped: int
    reason: str

    @property
    def planned(self) -> CallSiteOfPlan: ...


class OverlapOfModel(Protocol):
    """A `tensor.overlap_sites.Overlap`."""

    microbatches: str

    @property
    def call_sites(self) -> Sequence[CountedCallSite]: ...


class SequenceRegion(Protocol):
    """The sequence-parallel region at run time: a `tensor.region.Region`."""

    @property
    def inside(self) -> int | None:
        """The full sequence length, of the forward that is inside the region."""


class GradientEngine(Protocol):
    """What reduces gradients over the data axes: a `zero.reducer.Reducer`, or a `zero.fsdp.FsdpEngine`."""

    def hold(self, auto_flush: bool = False) -> None: ...

    def finish(self) -> None: ...

    def reset(self) -> None: ...


class SteppedShard(Protocol):
    """This rank's rows of a parameter as an optimizer steps them: a `zero.optimizer_shards.OptimizerShard`."""

    param: Any
    stepped: Any
    has_master: bool

    def follow_edits(self) -> None: ...


class DataAxes(Protocol):
    """The data axes, by ZeRO stage: a `zero.shard_data.DataRecord`."""

    mesh: MeshView
    zero: int

    @property
    def shards(self) -> Sequence[SteppedShard]: ...

    @property
    def engine(self) -> GradientEngine | None: ...


class TiedCopies(Protocol):
    """Parameters tied across stages: a `pipeline.ties.Ties`."""

    def copies(self) -> set[int]: ...


class ShardedSequences(Protocol):
    """Sequences over `cp`: a `context.forward_state.Context`."""

    group: Group
    mesh: MeshView

    def local_positions(self) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """(tokens of the full sequence, runs of this rank's positions) of the forward that runs, or is recomputed; None
        for all."""

    def shard_cache(self, cache: Any) -> object:
        """Let each rank store its tokens of a cache of `transformers`."""

    def in_generation(self) -> AbstractContextManager[None]:
        """A context in which forwards give the last token's logits, on every rank."""


class RecomputedModule(Protocol):
    """A `recomputation.unit.RecomputeUnit`."""

    on: bool


def as_instance(value: object, cls: type[C]) -> C | None:
    """A field of a record, which the room of `cls` has set or not."""
    assert value is None or isinstance(value, cls)
    return value
