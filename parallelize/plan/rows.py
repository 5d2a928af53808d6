"""What a plan's rules say about one module, one parameter, and the sequence-parallel region. Frozen data.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from parallelize.base.layout import Layout
from parallelize.plan.model_facts import ParameterFacts
from parallelize.plan.schema import Rule
from parallelize.plan.styles.contract import Contract

PendingElements = tuple[tuple[int, ...], int]
"""(tp ranks that sum, number of elements)."""


@dataclass(frozen=True)
class ModuleRow:
    """The rule and the contract of one module."""

    fqn: str
    rule: Rule
    contract: Contract


@dataclass(frozen=True)
class ParameterRow:
    """The layout of one parameter over `tp`, under its first name; `fact.names` are all its names (ties).

    Attributes:
        axis: "tp"; or "ep" of an expert that is folded over the data axes too, whose layout is over `ep`.
        partial: each rank has only a part of its gradient.
        plain: no style of a dict names it, so that it stays a plain tensor.
    """

    fact: ParameterFacts
    rule: Rule
    layout: Layout
    partial: bool
    plain: bool = False
    axis: str = "tp"

    @property
    def fqn(self) -> str:
        return self.fact.fqn

    @property
    def is_summed(self) -> bool:
        """Whether any rank of `tp` has a pending reduction of the gradient: all ranks then know it only when a step ends."""
        if self.layout.num_ranks == 1 or self.axis == "ep":
            return False
        return self.partial or any(self.layout.shared(rank) for rank in range(self.layout.num_ranks))

    def pending(self, rank: int) -> tuple[PendingElements, ...]:
        """The pending reductions over `tp` of one rank's gradient."""
        layout = self.layout
        if layout.num_ranks == 1 or self.axis == "ep" or (layout.dim is None and not self.partial):
            return ()
        if self.partial:
            return ((tuple(range(layout.num_ranks)), prod(layout.shape)),)
        assert layout.dim is not None
        width = prod(layout.local_shape(rank)) // max(layout.local_size(rank), 1)
        return tuple((ranks, (stop - start) * width) for start, stop, ranks in layout.shared(rank))


@dataclass(frozen=True)
class RegionRow:
    """The sequence-parallel region: entered at the input of `enter`, left at the output of `leave`."""

    enter: str
    leave: str
    argument: str = ""
