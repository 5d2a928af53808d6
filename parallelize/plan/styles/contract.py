"""What a style does to a module: layouts of its parameters, conversions of its input and output, and their collectives.

A *boundary conversion* redistributes an activation between two layouts, forward and backward as a pair. `apply` runs
the conversions, `explain` counts them; both read them here.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Conversion(Enum):
    """The boundary conversions. The collectives that each runs are in `_COLLECTIVES`."""

    NONE = "none"
    COPY = "copy"  # Replicate -> Replicate; the gradient of each rank is Partial
    REDUCE = "reduce"  # Partial -> Replicate
    SUM_BOTH = "sum_both"  # Partial -> Replicate; the gradient of each rank is Partial
    GATHER_SEQUENCE = "gather_sequence"  # Shard(sequence) -> Replicate; gradient Partial
    SCATTER_SEQUENCE = "scatter_sequence"  # Partial -> Shard(sequence)
    ENTER_REGION = "enter_region"  # Replicate -> Shard(sequence)
    LEAVE_REGION = "leave_region"  # Shard(sequence) -> Replicate; gradient Replicate
    GATHER_LAST = "gather_last"  # Shard(-1), or of channels, -> Replicate; gradient Replicate
    SPLIT_LAST = "split_last"  # Replicate -> Shard(-1)
    SPLIT_TOKENS = "split_tokens"  # Replicate -> Shard(tokens)
    GATHER_TOKENS = "gather_tokens"  # Shard(tokens) -> Replicate; gradient Replicate
    VOCABULARY = "vocabulary"  # Shard(-1) stays, marked as logits sharded over the vocabulary

    @property
    def forward(self) -> str | None:
        """The collective in forward, None where nothing is sent."""
        return _COLLECTIVES[self][0]

    @property
    def backward(self) -> str | None:
        """The collective in backward, None where nothing is sent."""
        return _COLLECTIVES[self][1]


_COLLECTIVES: dict[Conversion, tuple[str | None, str | None]] = {  # (forward, backward)
    Conversion.NONE: (None, None),
    Conversion.COPY: (None, "all_reduce"),
    Conversion.REDUCE: ("all_reduce", None),
    Conversion.SUM_BOTH: ("all_reduce", "all_reduce"),
    Conversion.GATHER_SEQUENCE: ("all_gather", "reduce_scatter"),
    Conversion.SCATTER_SEQUENCE: ("reduce_scatter", "all_gather"),
    Conversion.ENTER_REGION: (None, "all_gather"),
    Conversion.LEAVE_REGION: ("all_gather", None),
    Conversion.GATHER_LAST: ("all_gather", None),
    Conversion.SPLIT_LAST: (None, "all_gather"),
    Conversion.SPLIT_TOKENS: (None, "all_gather"),
    Conversion.GATHER_TOKENS: ("all_gather", None),
    Conversion.VOCABULARY: (None, None),
}

OVERLAPS = ("auto", "off", "chunked", "symm_mem")
"""How a linear's collectives are overlapped with its matmuls: chosen by measurement, not, in chunks, by symmetric
memory."""


@dataclass(frozen=True)
class Use:
    """How one parameter is stored over `tp`.

    Args:
        dim: the sharded dim, None for replicated.
        unit: names of sizes whose units must not be split, one per chunk: `("heads", "kv_heads", "kv_heads")`.
        chunks: number of equal chunks, each sharded by itself. Where units are named, each chunk contains an equal part
            of them all.
        adjacent: elements along `dim` that stay together, such as 2 for the pairs of an interleaved gate and up
            projection.
        partial: replicated, with a gradient that each rank has only in part.
        by_expert: stacked experts, divided over the ranks of `ep` along dim 0, rather than over those of `tp`. Where
            `dim` is another one, each expert is split along it over the ranks of `etp`.
        expert_dim: of `by_expert`: the dim along which experts follow each other. In dim 0 there may be `chunks` of
            them, of several rows each; in another dim each of `chunks` has one element of every expert.
        widths: for each of `unit`, the width of its units, the name of a size or a number, or "", where chunks of
            several widths are packed; empty: all units are equally wide.
    """

    dim: int | None = None
    unit: tuple[str, ...] = ()
    chunks: int = 1
    adjacent: int = 1
    partial: bool = False
    by_expert: bool = False
    expert_dim: int = 0
    widths: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputShard:
    """An argument that has a part for each head, of which a rank takes those of its heads.

    Args:
        argument: its name. dim: of the tensor.
        heads: the number of all of them.
        owned: (first, one past the last) of the heads of each rank.
    """

    argument: str
    dim: int
    heads: int
    owned: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class InputWidth:
    """An argument whose last dim a module's own code takes for that of this rank's heads, while the tensor is full.

    Args:
        argument: its name.
        full, local: the numbers of all heads, and of those that a rank has: the width is scaled by local / full.
    """

    argument: str
    full: int
    local: int


@dataclass(frozen=True)
class Traits:
    """What other modules may ask about a style, so that none of them compares its word.

    Attributes:
        splits_output: its output features are sharded, before `leave` converts them (column linears).
        sums_output: each rank computes one summand of the output, from a shard of the input's features (row linears).
        shares_input: it converts an input once for the modules inside it, and owns no parameters.
        replicates: all of its parameters are full on each rank.
        by_token: it runs between blocks, on each token alone: on sequence shards under sequence parallelism.
        keeps_layout: its output has whatever layout its input has.
        looks_up: its rows are sharded over the vocabulary, and looked up by id.
        for_parameters: a rule may give it to a bare parameter, as well as to a module.
        sees_full: what is inside runs on full activations, also where sequence parallelism splits those around it.
        wraps: it calls a layer, and adapters beside it, for which it does the conversions of the layer.
        reads_shards: its forward may read sharded parameters of its children, and computes with this rank's shards of
            them.
    """

    splits_output: bool = False
    sums_output: bool = False
    shares_input: bool = False
    replicates: bool = False
    by_token: bool = False
    keeps_layout: bool = False
    looks_up: bool = False
    for_parameters: bool = False
    sees_full: bool = False
    wraps: bool = False
    reads_shards: bool = False


@dataclass(frozen=True)
class Contract:
    """What a style does to one module.

    Args:
        style: the style's word, for messages.
        traits: what other modules may ask about the style; `contract_of` sets them.
        enter: the conversion of the input.
        leave: the conversion of the output.
        argument: name of the input that `enter` converts; empty means the first.
        max_inputs: the most positional inputs of a call; 0 means any number.
        sequence_dim: the dim that sequence conversions work on.
        feature_dim: the dim of the output's features: the last one, or that of the channels of a convolution.
        uses: parameter name to its use; a parameter that is not named is replicated.
        compute: what runs between the conversions: "stock" (the module's own forward), or a word that `apply` knows:
            "rowwise" (the bias is added once, after the reduction), "embedding" (ids outside the local shard give
            zeros), "channel_norm" (a batch or group norm of this rank's channels), "rms_norm" and "gated_norm" (the
            mean square is taken over all ranks that have a part of it), "scan" (a state-space mixer, which reads shards
            of its children's parameters), "multihead" (the arithmetic of `nn.MultiheadAttention` on this rank's heads),
            "ulysses" (its attention exchanges a sequence shard for a head shard), "deferred_head" (the loss runs its
            matmul), "lookup" (an embedding's own forward), "experts" (tokens, choices and their weights are converted,
            and each rank computes a shard of every expert), "dense experts" (as "experts", called with all tokens once
            for each expert), "whole experts" (tokens are sent to the ranks that have their experts, and their results
            back), "scaled experts" (the same, called as "dense experts").
        inputs: arguments of which each rank takes the parts of its heads.
        input_widths: arguments of which the module's own code reads a local width.
        sizes_by_tensor: whether the module's own code needs its local attributes and widths in full too, where it works
            on no shard.
        split: arguments that "ulysses" shards along the sequence, because they are full outside the region.
        local_attributes: attributes that store the width of a sharded dim, to the parameter that they follow.
        beside: of "whole experts": the child of their block that is computed while their results return; with a "?" if
            the block may have none.
        overlap: one of `OVERLAPS`, where the rule names one; empty means the plan's default.
        dtensors: where the module may meet DTensors, as PyTorch's styles allow: "" nowhere, "in", "in and out": it then
            returns one, or "in and inside": its own code is given one.
        forward_factory: for a registered style: (module, group of tp) -> a forward(module, *args, **kwargs), which
            replaces the module's own on more than one rank. None: by `compute`.
    """

    style: str
    enter: Conversion = Conversion.NONE
    leave: Conversion = Conversion.NONE
    argument: str = ""
    max_inputs: int = 0
    sequence_dim: int = 1
    feature_dim: int = -1
    uses: dict[str, Use] = field(default_factory=dict)
    compute: str = "stock"
    inputs: tuple[InputShard, ...] = ()
    input_widths: tuple[InputWidth, ...] = ()
    sizes_by_tensor: bool = False
    split: tuple[str, ...] = ()
    local_attributes: dict[str, str] = field(default_factory=dict)
    beside: str = ""
    overlap: str = ""
    dtensors: str = ""
    forward_factory: Callable[[Any, Any], Callable] | None = None
    traits: Traits = field(default_factory=Traits)

    @property
    def owns_parameters(self) -> bool:
        """Whether its rule claims the parameters of the module."""
        return not self.traits.shares_input

    @property
    def takes_shard(self) -> bool:
        """Whether the module is called with a shard of features, laid out as its weight."""
        return self.enter is Conversion.NONE and (
            self.traits.sums_output or self.compute in ("rms_norm", "gated_norm", "channel_norm")
        )

    @property
    def decides_inside(self) -> bool:
        """Whether the plan decides what the inside of the module computes, rather than the module's own code."""
        shards = self.traits.sums_output or self.traits.splits_output
        return shards or self.compute != "stock" or self.forward_factory is not None

    @property
    def is_linear(self) -> bool:
        """Whether it is a column or row linear."""
        return self.traits.splits_output or self.traits.sums_output

    @property
    def adds_bias_after_sum(self) -> bool:
        """Whether the bias is added once, after the partial outputs of the ranks were summed."""
        return self.compute == "rowwise"

    @property
    def returns_dtensor(self) -> bool:
        """Whether the output is a DTensor, as a style object asked for."""
        return self.dtensors == "in and out"

    @property
    def computes_with_dtensors(self) -> bool:
        """Whether the converted input is a DTensor, as a style object asked for."""
        return self.dtensors == "in and inside"

    @property
    def takes_ids(self) -> bool:
        """Whether its input are ids of an embedding."""
        return self.compute in ("embedding", "lookup")

    @property
    def defers_logits(self) -> bool:
        """Whether the loss runs its matmul."""
        return self.compute == "deferred_head"

    @property
    def computes_by_heads(self) -> bool:
        """Whether it is an `nn.MultiheadAttention` that computes this rank's heads."""
        return self.compute == "multihead"

    @property
    def runs_stock_forward(self) -> bool:
        """Whether the module's own forward computes on the shards, rather than code that a style brings."""
        return self.compute in ("stock", "rowwise") and self.forward_factory is None

    @property
    def norms_channels(self) -> bool:
        """Whether it is a batch or group norm of this rank's channels."""
        return self.compute == "channel_norm"

    @property
    def computes_experts(self) -> bool:
        """Whether it contains the experts of a mixture."""
        return self.compute in ("experts", "dense experts") or self.sends_tokens

    @property
    def splits_experts(self) -> bool:
        """Whether each rank computes a part of every expert, on converted tokens, choices and weights."""
        return self.compute == "experts"

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens go to the ranks that have their experts, and the results back."""
        return self.compute in ("whole experts", "scaled experts")

    @property
    def sends_chosen_rows(self) -> bool:
        """As `sends_tokens`, of experts that their block calls with every token: only the rows of chosen experts are
        sent."""
        return self.compute == "scaled experts"

    @property
    def exchanges_heads(self) -> bool:
        """Whether its attention exchanges a sequence shard for a head shard over tp."""
        return self.compute == "ulysses"
