"""What one rank stores of each parameter, and how its gradient is reduced, over every axis. Arithmetic on a resolved
plan.

| axis | parameters | gradients |
|---|---|---|
| `pp` | those of the rank's stages | tied ones are summed over the ranks that store them, when a step ends |
| `tp` (experts: `ep`) | the local shape of the layout | pending reductions of replicated parameters and shared heads, when a step ends |
| data axes | rows are split over the shard axis by the ZeRO stage | summed over all of them, in backward or when a step ends |

Torch-free.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from parallelize.base.layout import Layout, even_interval
from parallelize.base.mesh import MeshSpec, folded
from parallelize.plan.model_facts import ParameterFacts
from parallelize.plan.resolved import PendingElements, ResolvedPlan


class Splits(NamedTuple):
    """Over how many ranks of the shard axis the rows (dim 0) of a parameter are split, of each thing that is stored."""

    parameter: int = 1
    gradient: int = 1
    optimizer: int = 1


def splits_of(zero: int, mesh: MeshSpec, *, scalar: bool = False, ep: int = 1) -> Splits:
    """The splits of a ZeRO stage; a scalar has no rows to split. Source: ZeRO, arXiv:1910.02054.

    ep: of a parameter that is folded over the data axes: the copies over `edp` split it.
    """
    ranks = 1 if scalar else folded(mesh, ep).ranks("edp") if ep > 1 else mesh.ranks(mesh.shard_axis)
    return Splits(ranks if zero == 3 else 1, ranks if zero >= 2 else 1, ranks if zero >= 1 else 1)


def expert_zero_dim(layout: Layout, ranks: int) -> int:
    """The dim of a folded expert parameter that ZeRO 3 splits over `ranks` of `edp`.

    Another one than those along which the ranks of `ep` store different elements: so an interval of the full tensor
    stays one, and few experts on each rank are split evenly too. 0 where `ranks` divides none, as `fully_shard`
    requires of others than dim 0.
    """
    shape = layout.stored_local_shape(0)
    dims = (dim for dim in range(1, len(shape)) if dim not in layout.sharded_dims and shape[dim] % ranks == 0)
    return next(dims, 0)


@dataclass(frozen=True)
class ParameterShard:
    """One parameter on one rank.

    Attributes:
        name: the first of its names that are on this rank. names: all of its names on this rank.
        shape: of the shard over tp. stage: the last stage of this rank that uses it.
        late: whether its gradient is complete only when the step ends.
        splits: over the shard axis.
        pending: the pending reductions over tp of its gradient, for each of `names`.
        tied_ranks: the pp ranks that sum its gradient, where it is tied across ranks; else empty.
        zero_unit: of ZeRO 3: the module that it is gathered with.
        axis: that its layout is over: "tp", or "ep" of experts that are folded over data axes.
        zero_dim: whose slices are the rows that ZeRO splits.
        code_bytes: bytes of an element of codes or scales of a quantized weight; 0: it has the dtype of the others.
        weights: elements of the model's weights that it stands for: of codes of 4 bits, twice as many as it has itself.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    trained: bool
    stage: int
    late: bool
    splits: Splits
    pending: tuple[PendingElements, ...]
    tied_ranks: tuple[int, ...]
    zero_unit: str
    axis: str = "tp"
    zero_dim: int = 0
    code_bytes: int = 0
    weights: int = 0

    def item_bytes(self, of_others: int) -> int:
        """Bytes of an element. of_others: of a parameter that is no code."""
        return self.code_bytes or of_others

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """The size of the dim that ZeRO splits; 1 for a scalar."""
        return self.shape[self.zero_dim] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(size for dim, size in enumerate(self.shape) if dim != self.zero_dim)

    def padded_numel(self, ranks: int) -> int:
        """Elements of one data rank's rows, of `ranks`, rounded up to full rows."""
        return -(-self.rows // ranks) * self.width

    def local_numel(self, ranks: int, rank: int = 0) -> int:
        """Elements of the rows of one data rank, of `ranks`. The first one has the most."""
        start, stop = even_interval(self.rows, ranks, rank if ranks > 1 else 0)
        return (stop - start) * self.width


def shards_of(resolved: ResolvedPlan, pp_rank: int = 0, tp_rank: int = 0, ep_rank: int = 0) -> list[ParameterShard]:
    """The parameters of one rank, in the model's order."""
    tied_ranks: dict[str, tuple[int, ...]] = {}  # by one member of each tie: its gradient is summed once
    for tie in resolved.ties:
        local = (name for name in tie.members if resolved.stage_ranks[resolved.stage_of(name)] == pp_rank)
        if tie.reduce == "sum" and (name := next(local, None)) is not None:
            tied_ranks[name] = resolved.pp_ranks(tie.members)
    ranks = {"tp": tp_rank, "ep": ep_rank}
    shards = (_shard(resolved, fact, pp_rank, ranks, tied_ranks) for fact in resolved.facts.parameters.values())
    return [shard for shard in shards if shard is not None]


def _shard(
    resolved: ResolvedPlan,
    fact: ParameterFacts,
    pp_rank: int,
    ranks: Mapping[str, int],
    tied_ranks: Mapping[str, tuple[int, ...]],
) -> ParameterShard | None:
    """The parameter on one rank; None where the rank does not store it. ranks: its indices along tp and ep."""
    stage_of = {name: resolved.stage_of(name) for name in fact.names}
    names = tuple(name for name in fact.names if resolved.stage_ranks[stage_of[name]] == pp_rank)
    if not names:
        return None
    row = resolved.parameters[fact.fqn]
    local_stages = {stage_of[name] for name in names}
    tied = next((tied_ranks[name] for name in names if name in tied_ranks), ())
    folds, zero = row.axis == "ep", resolved.options.zero
    shape = row.layout.local_shape(ranks[row.axis])
    splits = splits_of(zero, resolved.mesh, scalar=not fact.shape, ep=row.layout.num_ranks if folds else 1)
    return ParameterShard(
        names[0],
        names,
        shape=shape,
        trained=fact.requires_grad,
        stage=max(local_stages),
        late=row.is_summed or len(local_stages) > 1,
        splits=splits,
        pending=row.pending(ranks["tp"]),
        tied_ranks=tied if len(tied) > 1 else (),
        zero_unit=resolved.zero_unit_of(names[0]),
        axis=row.axis,
        zero_dim=expert_zero_dim(row.layout, splits.parameter) if folds and zero == 3 else 0,
        code_bytes=fact.code_bytes,
        weights=replace(fact, shape=shape).num_weights,
    )


class StoredElements(NamedTuple):
    """Numbers that a rank stores: of parameters, gradients, and each state of the optimizer."""

    parameters: int
    gradients: int
    optimizer: int


def stored_elements(
    shards: Iterable[ParameterShard], zero: int, *, counts_gradients: bool, data_rank: int = 0
) -> StoredElements:
    """What a rank stores of these parameters.

    Args:
        counts_gradients: whether buffers of gradients have one more number per parameter: of the ranks that had a
            gradient.
        data_rank: the rank along the shard axis; the first one stores the most.
    """
    shards = list(shards)
    trained = [shard for shard in shards if shard.trained]
    counted = [shard for shard in trained if counts_gradients and zero < 3 and shard.splits.gradient == 1]
    return StoredElements(
        sum(shard.padded_numel(shard.splits.parameter) for shard in shards),
        sum(shard.padded_numel(shard.splits.gradient) for shard in trained) + len(counted),
        sum(shard.local_numel(shard.splits.optimizer, data_rank) for shard in trained),
    )


def zero_groups(shards: Iterable[ParameterShard]) -> Mapping[str, list[ParameterShard]]:
    """The parameters that `fully_shard` gathers together, by ZeRO unit. Folded experts are units of their own."""
    groups: dict[str, list[ParameterShard]] = {}
    for shard in shards:
        unit = shard.name.rpartition(".")[0] if shard.axis == "ep" else shard.zero_unit
        groups.setdefault(unit, []).append(shard)
    return groups
