"""What one rank of the pipeline holds of each parameter: its part over tp, and how its gradient is treated. Arithmetic.

Read from the rows of the resolved plan, which `parallelize_module` applies; without tp a parameter is whole.

Source of the sizes: `zero/memory.py` says how stages of ZeRO divide them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from parallelize.plan.model import ModelFacts
from parallelize.plan.resolve import ResolvedPlan
from parallelize.plan.stages import Stages


@dataclass(frozen=True)
class Share:
    """One parameter on one rank.

    Attributes:
        name: its first name among those that are here. names: all that are here. shape: this rank's part over tp.
        stage: of the pipeline, the last that uses it. late: its gradient is known only when a step ends.
        owed: elements of its gradient that are summed over parts of tp, by the ranks that share them, for each of `names`.
        tied: pp ranks that hold copies, more than one where it is tied across stages.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    trained: bool
    stage: int
    late: bool
    owed: tuple[tuple[tuple[int, ...], int], ...] = ()
    tied: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows along dim 0, as ZeRO cuts; a scalar is one."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        return prod(self.shape[1:])

    def padded(self, ranks: int) -> int:
        """Elements of one data rank's rows, rounded up."""
        return -(-self.rows // ranks) * self.width

    def own(self, ranks: int) -> int:
        """Elements of the first data rank's rows, which has most."""
        return min(self.padded(ranks), self.numel)


def shares_of(
    model: ModelFacts,
    resolved: ResolvedPlan | None,
    stages: Stages | None,
    places: Sequence[int],
    pp_rank: int,
    tp_rank: int = 0,
) -> list[Share]:
    """Shares of one rank in the model's order. `places[stage]` is the pp rank of a stage."""
    found = []
    for fact in model.parameters.values():
        by_stage = {name: (stages.stage_of(name) or 0) if stages is not None else 0 for name in fact.names}
        holders = sorted({places[stage] for stage in by_stage.values()})
        if pp_rank not in holders:
            continue
        here = tuple(name for name in fact.names if places[by_stage[name]] == pp_rank)
        row = resolved.parameters[fact.fqn] if resolved is not None else None
        mine = {by_stage[name] for name in here}
        owed = _owed(row, tp_rank) if resolved is not None and resolved.tp_size > 1 else ()
        found.append(
            Share(
                here[0],
                here,
                row.layout.local_shape(tp_rank) if row is not None else fact.shape,
                fact.requires_grad,
                max(mine),
                _anyone_owes(row, resolved) or len(mine) > 1,
                owed,
                tuple(holders) if len(holders) > 1 else (),
            )
        )
    return found


def _owed(row: Any, rank: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(ranks of tp, elements) of what is summed."""
    layout = row.layout
    if row.partial:
        return ((tuple(range(layout.num_ranks)), prod(layout.shape)),)
    if layout.dim is None:
        return ()
    width = prod(layout.shape) // max(layout.shape[layout.dim], 1)
    return tuple((ranks, (stop - start) * width) for start, stop, ranks in layout.shared(rank))


def _anyone_owes(row: Any, resolved: ResolvedPlan | None) -> bool:
    if row is None or resolved is None or resolved.tp_size == 1:
        return False
    return row.partial or any(row.layout.shared(rank) for rank in range(row.layout.num_ranks))


def zero_groups(shares: Iterable[Share], units: Sequence[str]) -> Mapping[str, list[Share]]:
    """Shares that `fully_shard` gathers as one: by unit, the rest under ""."""
    groups: dict[str, list[Share]] = {}
    for share in shares:
        unit = next((unit for unit in units if share.name.startswith(unit + ".")), "")
        groups.setdefault(unit, []).append(share)
    return groups
