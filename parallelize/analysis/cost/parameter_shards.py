"""The parameters that one pp rank stores: their local shapes over tp, and how their gradients are reduced. Arithmetic.

Computed from the resolved plan, which `parallelize_module` applies. Without tp every parameter is replicated.
`zero/state_bytes.py` says how the ZeRO stages divide them further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.stages import Stages

PendingElements = tuple[tuple[int, ...], int]  # (tp ranks that sum, number of elements)


@dataclass(frozen=True)
class ParameterShard:
    """One parameter on one rank.

    Attributes:
        name: the first of its names that are on this rank. names: all of its names on this rank.
        shape: of the shard over tp. stage: the last stage of this rank that uses it.
        late: whether its gradient is complete only when the step ends.
        pending: the pending reductions over tp of its gradient, for each of `names`.
        tied_ranks: the pp ranks that store a copy, where it is tied across ranks; else empty.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    trained: bool
    stage: int
    late: bool
    pending: tuple[PendingElements, ...] = ()
    tied_ranks: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """The size of dim 0, which ZeRO splits; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.shape[1:])

    def padded_numel(self, ranks: int) -> int:
        """Elements of one data rank's rows, of `ranks`, rounded up to full rows."""
        return -(-self.rows // ranks) * self.width

    def largest_numel(self, ranks: int) -> int:
        """Elements of the rows of the first data rank, which has the most."""
        return min(self.padded_numel(ranks), self.numel)


def shards_of(
    model: ModelFacts,
    resolved: ResolvedPlan | None,
    stages: Stages | None,
    stage_ranks: Sequence[int],
    pp_rank: int,
    tp_rank: int = 0,
) -> list[ParameterShard]:
    """The parameters of one rank, in the model's order. stage_ranks: the pp rank of each stage."""
    shards = []
    for fact in model.parameters.values():
        stage_of = {name: (stages.stage_of(name) or 0) if stages is not None else 0 for name in fact.names}
        ranks = sorted({stage_ranks[stage] for stage in stage_of.values()})
        if pp_rank not in ranks:
            continue
        names = tuple(name for name in fact.names if stage_ranks[stage_of[name]] == pp_rank)
        row = resolved.parameters[fact.fqn] if resolved is not None else None
        local_stages = {stage_of[name] for name in names}
        tp_row = row if resolved is not None and resolved.tp_size > 1 else None
        shards.append(
            ParameterShard(
                names[0],
                names,
                shape=row.layout.local_shape(tp_rank) if row is not None else fact.shape,
                trained=fact.requires_grad,
                stage=max(local_stages),
                late=(tp_row is not None and _any_pending(tp_row)) or len(local_stages) > 1,
                pending=_pending(tp_row, tp_rank) if tp_row is not None else (),
                tied_ranks=tuple(ranks) if len(ranks) > 1 else (),
            )
        )
    return shards


def _pending(row: ParameterRow, rank: int) -> tuple[PendingElements, ...]:
    layout = row.layout
    if row.partial:
        return ((tuple(range(layout.num_ranks)), prod(layout.shape)),)
    if layout.dim is None:
        return ()
    width = prod(layout.shape) // max(layout.shape[layout.dim], 1)
    return tuple((ranks, (stop - start) * width) for start, stop, ranks in layout.shared(rank))


def _any_pending(row: ParameterRow) -> bool:
    """Whether any tp rank has a pending reduction of the parameter: all ranks then treat its gradient as late."""
    return row.partial or any(bool(row.layout.shared(rank)) for rank in range(row.layout.num_ranks))


def zero_groups(shards: Iterable[ParameterShard], units: Sequence[str]) -> Mapping[str, list[ParameterShard]]:
    """The parameters that `fully_shard` gathers together: by FSDP unit, and the rest under ""."""
    groups: dict[str, list[ParameterShard]] = {}
    for shard in shards:
        unit = next((unit for unit in units if shard.name.startswith(unit + ".")), "")
        groups.setdefault(unit, []).append(shard)
    return groups
