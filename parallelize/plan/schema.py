"""What a plan file says, as frozen data. `load.py` reads it, `resolve.py` applies it to a model's names and shapes.

Floor 2: torch-free.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from parallelize.styles.text import StyleText

SCHEMA_VERSION = 1
ATTENTION = ("causal", "bidirectional")


@dataclass(frozen=True)
class Rule:
    """A pattern of module or parameter names, and the style that serves them. `optional`: it may match nothing."""

    pattern: str
    style: StyleText
    where: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Size:
    """A count that rules refer to, such as heads: a number, or the name of a field of the model's config.

    `replicate_below_tp`: with fewer than `tp` ranks, each is held by several of them (key/value heads).
    """

    source: str | int
    replicate_below_tp: bool = False
    where: str = ""


@dataclass(frozen=True)
class Region:
    """The part of the model where activations are sharded along the sequence.

    Entered at the input of the first of `layers`, left at the output of `leave` (or, where the model has none, of the
    last of `layers`). Masks, positions and rotary tables are computed outside it.
    """

    layers: str
    leave: str = ""
    argument: str = ""
    where: str = ""


@dataclass(frozen=True)
class LocalAttribute:
    """An attribute that a stock forward reads and that must be scaled as `sizes` are: `num_heads: heads`.

    `divide_by` handles ratios such as `num_key_value_groups: heads/kv_heads`.
    """

    pattern: str
    attribute: str
    size: str
    divide_by: str = ""
    where: str = ""


@dataclass(frozen=True)
class Cuts:
    """Where a pipeline may be cut: between the children of `layers`, and before and after them.

    Attributes:
        layers: the list whose children are called one after another.
        first, last: modules that run before and after it, in the order in which they run. Where both are empty, the
            modules that stand before and after `layers` in the model.
        every: modules without parameters that every stage needs (rotary tables).
        skips: (from, to) modules: what the first returns is used beside the second, stages later.
        carry: arguments of a layer's forward that come from the layer before, and travel to another stage. Default: the
            first; arguments that require a gradient travel always.
    """

    layers: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    skips: tuple[tuple[str, str], ...] = ()
    carry: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Tie:
    """Parameters that are one: copies on several stages start equal and stay equal.

    `reduce`: "sum" where each copy's gradient is a part, "none" where they are equal by construction.
    """

    name: str
    members: tuple[str, ...]
    reduce: str = "sum"
    where: str = ""


@dataclass(frozen=True)
class Plan:
    """All that one plan file says. Order of rules has no meaning."""

    name: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    base: str = ""
    sizes: dict[str, Size] = field(default_factory=dict)
    region: Region | None = None
    local: tuple[LocalAttribute, ...] = ()
    cuts: Cuts | None = None
    ties: tuple[Tie, ...] = ()
    zero_units: tuple[str, ...] = ()
    recompute_units: tuple[str, ...] = ()
    attention: tuple[tuple[str, str], ...] = ()  # (pattern, one of ATTENTION)
    positions: str = "position_ids"  # the argument that takes positions in the whole sequence, or "none"
    positions_from: str = ""  # the mask that the model counts positions by, where none are given
    packing: str = "positions"  # where positions start again another document begins; or "none"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    fuse_loss: bool = False
    overlap: str = "off"  # one of styles.contract.OVERLAPS
    source: str = ""
    unclaimed: str = "refuse"  # "refuse", or "replicate" for plans that were translated

    def with_options(
        self,
        *,
        sequence_parallel: bool | None,
        loss_parallel: bool | None,
        overlap: str | None = None,
        fuse_loss: bool | None = None,
    ) -> Plan:
        """The same plan with the caller's choices over the file's defaults (None keeps the default)."""
        return replace(
            self,
            sequence_parallel=self.sequence_parallel if sequence_parallel is None else sequence_parallel,
            loss_parallel=self.loss_parallel if loss_parallel is None else loss_parallel,
            overlap=self.overlap if overlap is None else overlap,
            fuse_loss=self.fuse_loss if fuse_loss is None else fuse_loss,
        )

    def facts(self) -> dict[str, str]:
        """Everything that changes what is computed or sent, as text by key: what the ranks compare."""
        facts = {f"rule {rule.pattern}": str(rule.style) for rule in self.rules}
        facts |= {f"size {name}": f"{size.source} {size.replicate_below_tp}" for name, size in self.sizes.items()}
        facts |= {f"local {item.pattern}.{item.attribute}": f"{item.size}/{item.divide_by}" for item in self.local}
        facts |= {f"tie {tie.name}": f"{' '.join(tie.members)} {tie.reduce}" for tie in self.ties}
        facts["pipeline"] = str(self.cuts and replace(self.cuts, where=""))
        facts["region"] = f"{self.region.layers} {self.region.leave}" if self.region else ""
        facts["sequence_parallel"] = str(self.sequence_parallel)
        facts["loss_parallel"] = str(self.loss_parallel)
        facts["fuse_loss"] = str(self.fuse_loss)
        facts["overlap"] = self.overlap
        facts |= {f"attention {pattern}": kind for pattern, kind in self.attention}
        facts["positions"] = f"{self.positions} {self.positions_from} {self.packing}"
        return facts

    def digest(self) -> str:
        """A short hash of `facts`: equal for plans that do the same."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(self.facts().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
