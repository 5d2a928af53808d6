"""What a style is: its word and options in a plan, the contract that it makes for a module, and what may be asked about
it.

A builder sees the module through `ModuleFacts`, and its surroundings (the sequence-parallel region, a gathered input,
the modes that are on) through `StyleContext`. `builtin.py` has the styles of this package; `register_style` adds one.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from parallelize.base.errors import PlanError, Problem
from parallelize.plan.styles.contract import Contract, Traits

_WORD = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True)
class ModuleFacts:
    """What a style needs to know of a module.

    Attributes:
        fqn: the module's name.
        kind: "linear" (weight [out, in]), "conv1d" (weight [in, out], as GPT-2 stores it), "embedding", "norm",
            "experts" (those of a mixture, called with tokens, choices and weights), "expert block" (the router is
            inside too), "depthwise" (a convolution of each channel), "grouped" (one of groups of channels), "other".
        class_name: the class name, for messages.
        shapes: full shapes of its direct parameters, by name.
        flags: of experts: how their weights are stored and computed with, as `transformers` marks an instance
            (`EXPERT_FLAGS`).
        num_experts: of experts: how many there are. inner: full shapes of their weights, by dotted name, where these
            are in modules inside.
        packs: of a quantized linear: parameter name to the elements of a row of the weight that one of its elements
            stands for, of the codes first. Their shapes are [out, in / that number]. block: elements of a row that are
            never split.
        stacked: of quantized experts: name of a stacked weight to the names of its codes and scales.
    """

    fqn: str
    kind: str
    class_name: str
    shapes: dict[str, tuple[int, ...]]
    flags: Mapping[str, bool] = field(default_factory=dict)
    num_experts: int = 0
    inner: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    packs: Mapping[str, int] = field(default_factory=dict)
    block: int = 1
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def weight_key(self) -> str:
        """The parameter with the weight of a linear or embedding: `weight`, or its codes."""
        return next(iter(self.packs), "weight")

    def with_weights(self) -> ModuleFacts:
        """The facts with stacked weights in the place of their codes and scales."""
        if not self.stacked:
            return self
        coded = {key: name for name, keys in self.stacked.items() for key in keys}
        shapes: dict[str, tuple[int, ...]] = {}
        for key, shape in self.shapes.items():
            shapes.setdefault(coded.get(key, key), (*shape[:-1], shape[-1] * self.packs.get(key, 1)))
        return replace(self, shapes=shapes)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight, also where codes of several elements are one."""
        shape = self.shapes[self.weight_key]
        return (*shape[:-1], shape[-1] * self.packs.get(self.weight_key, 1))


@dataclass(frozen=True)
class StyleContext:
    """The surroundings of a module, and the modes that are on.

    Attributes:
        sequence_parallel: the mode is on, and the module is inside the region.
        loss_parallel, fuse_loss: the modes of the plan.
        input_gathered: a module that contains this one has a `gather` rule.
        sends_tokens: tokens go to the ranks of their experts, rather than each rank having a part of all experts.
        etp: ranks over which each of these experts is split.
        divides_adapters: adapters of experts are divided as these are, rather than full on each rank.
    """

    sequence_parallel: bool = False
    loss_parallel: bool = False
    fuse_loss: bool = False
    input_gathered: bool = False
    sends_tokens: bool = False
    etp: int = 1
    divides_adapters: bool = False


@dataclass(frozen=True)
class Style:
    """The definition of a style.

    Attributes:
        word: its name in plans.
        build: (style text, module, surroundings) -> the contract for that module. It may raise ParallelizeError.
        options: names of its options to the values allowed; None: any text.
        positional: the option whose value may be written without its name.
        traits: what may be asked about it.
        in_plans: whether plan files and dicts may use the word; else only `lowering.py` makes rules with it.
    """

    word: str
    build: Callable[[StyleText, ModuleFacts, StyleContext], Contract]
    options: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    positional: str = ""
    traits: Traits = field(default_factory=Traits)
    in_plans: bool = True


STYLES: dict[str, Style] = {}


def register_style(style: Style) -> None:
    """Make a style known by its word, in plan files and dicts. Register it on every rank, before plans are read.

    Args:
        style: the definition. Its contract says everything that is checked, explained, verified and run.

    Raises: PlanError `bad-style` for a word that is no identifier, `repeated-style` for one that is taken.
    Cost: no communication.
    """
    if not _WORD.match(style.word):
        raise PlanError(Problem("bad-style", f"{style.word!r} is no word", fix="letters, digits and underscores"))
    if STYLES.get(style.word, style) is not style:
        raise PlanError(
            Problem("repeated-style", f"a style is called {style.word!r} already", fix="choose another word")
        )
    STYLES[style.word] = style


def contract_of(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """The contract of `style` on `module`.

    Raises: ModelError `wrong-module-for-style`, and what the style's builder raises.
    """
    built = style.definition.build(style, module.with_weights(), context)
    contract = _contract_of_codes(replace(built, traits=style.traits), module)
    return replace(contract, overlap=style.options["overlap"]) if "overlap" in style.options else contract


def _contract_of_codes(contract: Contract, module: ModuleFacts) -> Contract:
    """The contract of quantized experts: codes and scales are used as the stacked weight that they stand for."""
    if not module.stacked:
        return contract
    uses = {key: use for name, use in contract.uses.items() for key in module.stacked.get(name, (name,))}
    attributes = {key: module.stacked.get(name, (name,))[0] for key, name in contract.local_attributes.items()}
    return replace(contract, uses=uses, local_attributes=attributes)


REST = "rest"
"""In the place of a size: the features that the other chunks of a dim leave, an equal part of them in each such
chunk. A plan may have a size of this name, which then counts."""


def terms_of(text: str) -> tuple[tuple[str, str], ...]:
    """(name, width or "") of each term of `a + b*width`; empty for an empty text."""
    terms = (part.partition("*") for part in text.split("+")) if text else ()
    return tuple((name.strip(), width.strip()) for name, _, width in terms)


@dataclass(frozen=True)
class StyleText:
    """A style as a plan writes it, after it was checked.

    Attributes:
        word: the name of the style.
        options: the values of its options, by name.
    """

    word: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ", ".join(
            value if self.definition.positional == key else f"{key}={value}" for key, value in self.options.items()
        )
        return f"{self.word}({options})" if options else self.word

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def unit(self) -> tuple[str, ...]:
        """The names in the option `unit`, which are joined by `+`; empty without the option."""
        return tuple(name for name, _ in terms_of(self.options.get("unit", "")))

    @property
    def widths(self) -> tuple[str, ...]:
        """For each name in `unit`, the width of its units, a size or a number: `heads*head_dim`, `heads*1`; empty where
        it is not named."""
        return tuple(width for _, width in terms_of(self.options.get("unit", "")))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of all sizes of the plan that it uses."""
        return tuple(name for name in (*self.unit, *self.widths) if name and not name.isdigit())

    @property
    def chunks(self) -> int:
        """The value of the option `chunks`; 1 without the option."""
        return int(self.options.get("chunks", "1"))

    @property
    def definition(self) -> Style:
        """The style that is registered under `word`."""
        return STYLES[self.word]

    @property
    def traits(self) -> Traits:
        """The traits of the style."""
        return self.definition.traits

    @property
    def keeps_vocabulary(self) -> bool:
        """Whether its output stays sharded over the vocabulary under loss parallelism."""
        return self.options.get("output") == "vocabulary" or "head" in self.options
