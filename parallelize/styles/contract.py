"""What a style promises: how input comes in, how parameters lie, what goes out, and what that costs.

An *edge* is a conversion of an activation between two layouts, forward and backward as a pair. `apply` runs the edges,
`explain` counts them; both read them here.

Floor 1: torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Edge(Enum):
    """An activation's conversion: (forward collective, backward collective), None where nothing is sent."""

    NONE = (None, None)
    COPY = (None, "all_reduce")  # Replicate in; every rank's gradient is a part of the sum
    REDUCE = ("all_reduce", None)  # Partial -> Replicate
    GATHER_SEQUENCE = ("all_gather", "reduce_scatter")  # Shard(sequence) -> Replicate, gradient Partial
    SCATTER_SEQUENCE = ("reduce_scatter", "all_gather")  # Partial -> Shard(sequence)
    ENTER_REGION = (None, "all_gather")  # Replicate -> Shard(sequence)
    LEAVE_REGION = ("all_gather", None)  # Shard(sequence) -> Replicate, gradient Replicate
    GATHER_LAST = ("all_gather", None, "last")  # Shard(-1) -> Replicate, gradient Replicate
    SPLIT_LAST = (None, "all_gather", "last")  # Replicate -> Shard(-1)
    VOCABULARY = (None, None, "vocabulary")  # Shard(-1) stays, marked as logits sharded over the vocabulary

    @property
    def forward(self) -> str | None:
        return self.value[0]

    @property
    def backward(self) -> str | None:
        return self.value[1]


OVERLAPS = ("auto", "off", "chunked", "symm_mem")
"""How the collectives of a linear run beside its products: by measurement, not, in pieces, by symmetric memory."""


@dataclass(frozen=True)
class Use:
    """How one parameter lies over `tp`.

    Args:
        dim: the sharded dim, None for replicated.
        unit: names of sizes whose blocks must not be cut, one a chunk: `("heads", "kv_heads", "kv_heads")`.
        chunks: equal chunks that are split each by itself, where no unit is named.
        partial: replicated, but each rank's gradient is only a part of the sum.
    """

    dim: int | None = None
    unit: tuple[str, ...] = ()
    chunks: int = 1
    partial: bool = False


@dataclass(frozen=True)
class Contract:
    """What a style does to one module.

    Args:
        style: the word.
        enter, leave: edges of the input and of the output.
        argument: name of the input that `enter` converts; empty means the first.
        sequence_dim: the dim that sequence edges work on.
        uses: parameter name to its use; a parameter that is not named is replicated.
        compute: what runs between the edges: "stock" (the module's own forward), or a word that `apply` knows:
            "rowwise" (bias added once, after the reduction), "embedding" (ids outside the local rows give zeros),
            "rms_norm" (the mean square is taken over all ranks), "ulysses" (its attention trades rows for heads), "deferred_head" (its product is left to the loss).
        split: arguments whose rows are whole outside the region, and of which "ulysses" takes this rank's.
        local_attributes: attributes that hold a sharded dim's width and become local with it.
        overlap: one of `OVERLAPS`, where the rule says so; empty: as the plan says.
    """

    style: str
    enter: Edge = Edge.NONE
    leave: Edge = Edge.NONE
    argument: str = ""
    sequence_dim: int = 1
    uses: dict[str, Use] = field(default_factory=dict)
    compute: str = "stock"
    split: tuple[str, ...] = ()
    local_attributes: dict[str, str] = field(default_factory=dict)
    overlap: str = ""
