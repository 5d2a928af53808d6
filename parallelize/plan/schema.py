"""The content of a plan file, as frozen data. `plan_file.py` reads it; `resolve.py` matches it with a model's names and
shapes.

Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from parallelize.plan.options import ROW_OPTIONS, STANDARD, Options, options_of
from parallelize.plan.styles.style import StyleText

SCHEMA_VERSION = 1
ATTENTION = ("causal", "bidirectional", "gathered")  # the last: not by attention alone, see `AttentionRule`
ALLOWED = ("reads-child-parameters",)  # what `allow:` may name: checks whose mistakes the first forward finds


@dataclass(frozen=True)
class AttentionRule:
    """A pattern of modules that mix tokens, for `cp`.

    Attributes:
        kind: of `ATTENTION`: "causal" and "bidirectional" attention runs over the ranks; around a "gathered" module the
            full sequence is gathered, each rank runs the module on all of it, and its own tokens of the output are
            selected.
        child: only modules with this child, where modules of one name are of several kinds; "" for all.
        optional: the pattern may match nothing.
    """

    pattern: str
    kind: str
    child: str = ""
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.pattern} with {self.child}" if self.child else self.pattern


@dataclass(frozen=True)
class Rule:
    """A pattern of module or parameter names, and their style.

    Attributes:
        pattern: of fqns.
        style: of every module or parameter that matches.
        where: file, line and column, for messages; so in the classes below.
        optional: the pattern may match nothing.
    """

    pattern: str
    style: StyleText
    where: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Size:
    """A count whose units are never split, such as the number of heads.

    Attributes:
        source: the number, or the name of a field of the model's config.
        replicate_below_tp: where there are fewer units than `tp` ranks, several ranks store each (key/value heads).
    """

    source: str | int
    replicate_below_tp: bool = False
    where: str = ""


@dataclass(frozen=True)
class RegionBounds:
    """A part of the model in which activations are sequence shards.

    It begins at the input of the first of `layers` and ends at the output of `leave` (where the model has no such
    module, of the last of `layers`). Masks, positions and rotary tables are computed outside it.

    Attributes:
        layers: fqn of the list of layers.
        leave: fqn of the last module.
        argument: the argument of a layer that is sharded; empty means the first.
    """

    layers: str
    leave: str = ""
    argument: str = ""
    where: str = ""


@dataclass(frozen=True)
class LocalAttribute:
    """An attribute that a stock forward reads and that becomes local with a size: `num_heads: heads`.

    Attributes:
        pattern: of module names.
        attribute: of these modules; may be dotted.
        size: the size that it is scaled with.
        divide_by: the second size of a ratio, as in `num_key_value_groups: heads/kv_heads`.
        optional: the pattern may match nothing.
        terms: of an attribute that is a sum of products, as in `conv_dim: heads*head_dim + groups*state`: (size, width)
            of each; sizes become local, and widths, which may be empty, stay.
        if_present: modules without the attribute are left as they are, where layers of several classes have one name.
        elsewhere_full: whether the code needs the full value too, where it works on no shard.
    """

    pattern: str
    attribute: str
    size: str
    divide_by: str = ""
    where: str = ""
    optional: bool = False
    terms: tuple[tuple[str, str], ...] = ()
    if_present: bool = False
    elsewhere_full: bool = False

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of all sizes that it is computed from."""
        names = (self.size, self.divide_by, *(name for term in self.terms for name in term))
        return tuple(name for name in names if name and not name.isdigit())

    def __str__(self) -> str:
        if self.terms:
            return " + ".join("*".join(filter(None, term)) for term in self.terms)
        return f"{self.size}/{self.divide_by}"


@dataclass(frozen=True)
class LocalInput:
    """An argument of a module that has a part for each head, such as ALiBi's biases: a rank takes those of its heads.
    Or an argument whose last size the module's own code takes for the width of all heads (`B, T, C = x.shape`): it
    reads that of a rank's heads.

    Attributes:
        pattern: of module names.
        argument: of the module's forward; None is passed as it is.
        dim: of the tensor. Its size is that of `size`, or a multiple (batch before heads); a dim of 1 is broadcast, and
            stays. None: the tensor stays full, and its width is read as a local one.
        size: the size by which the heads are sharded.
        optional: the pattern may match nothing.
        elsewhere_full: of a width, whether the code needs the full one too, where it works on no shard.
    """

    pattern: str
    argument: str
    dim: int | None
    size: str
    where: str = ""
    optional: bool = False
    elsewhere_full: bool = False


@dataclass(frozen=True)
class Case:
    """Sections of a plan that hold for some of its models: an entry of `when:`.

    Attributes:
        condition: (field of the config, whether it must be true or false); all must hold. A field that is absent is
            false.
        rules, sizes, local, local_inputs: added to those of the plan.
    """

    condition: tuple[tuple[str, bool], ...]
    rules: tuple[Rule, ...] = ()
    sizes: dict[str, Size] = field(default_factory=dict)
    local: tuple[LocalAttribute, ...] = ()
    local_inputs: tuple[LocalInput, ...] = ()
    where: str = ""


LONGEST_LIST = "*"
"""The layers of a pipeline where none are named: those of the sequence-parallel region, else the longest list."""


@dataclass(frozen=True)
class Cuts:
    """Where a model may be split into pipeline stages: between the children of `layers`, and before and after them.

    Attributes:
        layers: fqn of the list whose children are called one after another; default: those of the
            sequence-parallel region, else the list with the most modules.
        first: modules that run before `layers`, in calling order.
        last: modules that run after `layers`, in calling order. Where `first` and `last` are both empty, the modules
            before and after `layers` in the order of the model.
        every: modules without parameters that every stage runs (rotary tables).
        skips: (source, target) modules: the output of the source is used in the stage of the target.
        carry: arguments of a layer's forward that are outputs of the previous layer, and are sent to the next stage.
            Default: the first. Arguments that require a gradient are always sent.
        where: file, line and column, for messages.
    """

    layers: str = LONGEST_LIST
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    skips: tuple[tuple[str, str], ...] = ()
    carry: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Tie:
    """Tied parameters: their copies on several stages start equal and stay equal.

    Attributes:
        name: for messages.
        members: fqns of parameters of one shape.
        reduce: "sum" where the gradient of each copy is a part, "none" where they are equal by construction.
        where: file, line and column, for messages.
    """

    name: str
    members: tuple[str, ...]
    reduce: str = "sum"
    where: str = ""


@dataclass(frozen=True)
class UnloweredStyle:
    """A style object of a dict that is applied as it is, because no rule means the same.

    Attributes:
        fqn: of its module.
        style: the object.
        text: the object as text that is the same on every rank.
        reason: why there is no rule.
    """

    fqn: str
    style: Any = field(compare=False, repr=False)
    text: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """All rules of a model family, as one plan file has them. The order of rules has no meaning.

    Attributes:
        name: of the file.
        rules: patterns and styles for tensor parallelism.
        model_types: values of `config.model_type` that the plan is for.
        classes: class names that the plan is for.
        base: fqn of the base model inside the model with a head.
        sizes: by name.
        regions: for sequence parallelism, one after another in a forward, as of an encoder and a decoder.
        local: attributes that become local.
        local_inputs: arguments of which a rank takes the parts of its heads.
        cases: sections for some of the models, by their config; empty once the plan is for a model.
        cuts: where a pipeline may split the model.
        ties: of parameters that are different objects.
        zero_units: patterns of FSDP units.
        recompute_units: patterns of the modules that `recompute` runs again in backward.
        attention: which modules mix tokens, and how.
        positions: the argument for positions in the full sequence, or "none".
        positions_from: the mask from which the model counts positions where none are passed.
        packing: "positions": a document begins where positions start again; or "none".
        sequences: the module at whose call `cp` shards sequences; empty: the text model beside a tower, or the model.
        options: the plan's `defaults:`; once it is to be applied, the complete options of the run.
        allow: slugs of checks of source text that the plan turns off, of `ALLOWED`.
        source: the file, for messages.
        unlowered_styles: style objects of a dict that are applied as they are.
        on_unclaimed: "refuse" parameters without a rule, "replicate" them (dicts of words and translated plans), or
            "leave" them as they are (PyTorch's style objects).
    """

    name: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    base: str = ""
    sizes: dict[str, Size] = field(default_factory=dict)
    regions: tuple[RegionBounds, ...] = ()
    local: tuple[LocalAttribute, ...] = ()
    local_inputs: tuple[LocalInput, ...] = ()
    cases: tuple[Case, ...] = ()
    cuts: Cuts | None = None
    ties: tuple[Tie, ...] = ()
    zero_units: tuple[str, ...] = ()
    recompute_units: tuple[str, ...] = ()
    attention: tuple[AttentionRule, ...] = ()
    positions: str = "position_ids"
    positions_from: str = ""
    packing: str = "positions"
    sequences: str = ""
    allow: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    source: str = ""
    unlowered_styles: tuple[UnloweredStyle, ...] = ()
    on_unclaimed: str = "refuse"

    @property
    def layers_region(self) -> RegionBounds | None:
        """The region, where there is one alone: of an encoder and a decoder none has the layers of the model."""
        return self.regions[0] if len(self.regions) == 1 else None

    def with_options(self, options: Options | None = None, **keywords: Any) -> Plan:
        """The plan with complete options: the caller's, over its defaults, over the package's. None keeps a default.

        Args:
            options: the caller's options as one object.
            keywords: the caller's options by name, which win over `options`.

        Raises: ModelError `unknown-option`, and as `Options`.
        """
        return replace(self, options=options_of(options, keywords).complete(self.options))

    def for_config(self, value_of: Callable[[str], Any]) -> Plan:
        """The plan for one model: with the sections under `when:` that hold for it. value_of: a field of its config, or
        None."""
        cases = [c for c in self.cases if all(bool(value_of(name)) is truth for name, truth in c.condition)]
        return replace(
            self,
            cases=(),
            rules=self.rules + tuple(rule for case in cases for rule in case.rules),
            sizes=self.sizes | {name: size for case in cases for name, size in case.sizes.items()},
            local=self.local + tuple(item for case in cases for item in case.local),
            local_inputs=self.local_inputs + tuple(item for case in cases for item in case.local_inputs),
        )

    def facts(self) -> dict[str, str]:
        """Everything that changes what is computed or sent, as text by key. The handshake compares it over the
        ranks."""
        facts = {f"rule {rule.pattern}": str(rule.style) for rule in self.rules}
        facts |= {f"size {name}": f"{size.source} {size.replicate_below_tp}" for name, size in self.sizes.items()}
        facts |= {f"local {item.pattern}.{item.attribute}": str(item) for item in self.local}
        facts |= {f"input {item.pattern}.{item.argument}": f"{item.dim} {item.size}" for item in self.local_inputs}
        facts |= {f"tie {tie.name}": f"{' '.join(tie.members)} {tie.reduce}" for tie in self.ties}
        facts["pipeline"] = str(self.cuts and replace(self.cuts, where=""))
        facts["region"] = " ".join(f"{region.layers} {region.leave}" for region in self.regions)
        modes = self.options.over(STANDARD)
        facts |= {name: str(getattr(modes, name)) for name in (*ROW_OPTIONS, "overlap")}
        facts |= {f"style {item.fqn}": item.text for item in self.unlowered_styles}
        facts |= {f"attention {rule}": rule.kind for rule in self.attention}
        facts["positions"] = f"{self.positions} {self.positions_from} {self.packing} {self.sequences}"
        return facts

    def digest(self) -> str:
        """A short hash of `facts`, equal for plans that do the same."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(self.facts().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
