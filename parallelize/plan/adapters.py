"""A plan for a model with adapters of PEFT: names get PEFT's prefix, and the rule of a layer becomes those of its
parts.

PEFT replaces a layer by a module that has the layer as `base_layer`, beside its adapters, or as `original_module`,
beside trained copies. Plans name the layers of the stock model: what is inside is planned by their styles
(`plan/styles/adapter_styles.py`).

Torch-free: adapters are recognized by the modules that PEFT gives a layer, and PEFT is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallelize.base.errors import PlanError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import alternatives, generic, is_default, matches
from parallelize.plan.schema import LONGEST_LIST, Cuts, Plan, Rule
from parallelize.plan.styles.adapter_styles import adapter_styles, adapts_one_parameter, adapts_parameters
from parallelize.plan.styles.style import StyleText

BASE, ORIGINAL, COPIES = "base_layer", "original_module", "modules_to_save"

_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B", "ia3_l")
_WITHOUT_PARAMETERS = ("lora_dropout",)
TOKENS = ".token_adapter"
_VARIANTS = ("DoraLinearVariant", "ALoraLinearVariant", "QALoraLinearVariant")


def adapted_layers(model: ModelFacts) -> tuple[str, ...]:
    """The names of the modules that call a layer and its adapters."""
    return tuple(name for name in model.modules if f"{name}.{BASE}" in model.modules)


def copied_layers(model: ModelFacts) -> tuple[str, ...]:
    """The names of the modules that call one of several copies of a layer (`modules_to_save`)."""
    names = (name for name in model.modules if f"{name}.{ORIGINAL}" in model.modules)
    return tuple(name for name in names if f"{name}.{COPIES}" in model.modules)


def is_adapted(name: str) -> bool:
    """Whether a module is the layer beside adapters."""
    return name.endswith(f".{BASE}")


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter was added by PEFT, rather than being one of the stock model."""
    return not {*_PARTS, COPIES, PROMPTS}.isdisjoint(name.split("."))


def layer_name(name: str) -> str:
    """The name in the stock model of a layer that has adapters, or trained copies."""
    owner = name.removesuffix(f".{ORIGINAL}")
    while is_adapted(owner):
        owner = owner.removesuffix(f".{BASE}")
    return owner.rpartition(f".{COPIES}.")[0] or owner


def peft_prefix(model: ModelFacts) -> str:
    """What stands before the names of the stock model, with a dot; empty where PEFT does not wrap it."""
    name, module = "", model.root
    # of its bases, because `fully_shard` changes the class
    while any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__):
        child = next((key for key in ("base_model", "model") if f"{name}{key}" in model.modules), "")
        if not child:
            return ""
        module, name = model.objects[f"{name}{child}"], f"{name}{child}."
    return name


def for_adapters(plan: Plan, model: ModelFacts) -> Plan:
    """The plan for a model with adapters; the same plan where it has none.

    Args:
        plan: for the stock model, with the prefix of PEFT (`renamed`).

    Raises: PlanError `unplanned-adapter`.
    """
    if plan.on_unclaimed == "leave":  # a dict of style objects names each module itself
        return plan
    adapted, copied = adapted_layers(model), copied_layers(model)
    rules = _Rules(model, adapted, copied)
    if not adapted and not copied:
        return replace(plan, rules=(*plan.rules, *rules.of_prompts(plan)))
    adapted_rules = tuple(new for rule in plan.rules for new in rules.of(rule))
    if plan.rules and (problems := [*rules.problems, *rules.unplanned()]):  # layers that nothing splits need no rules
        raise PlanError(*problems)
    ties = tuple(replace(tie, members=tuple(map(rules.parameter, tie.members))) for tie in plan.ties)
    return replace(plan, rules=(*adapted_rules, *rules.of_prompts(plan)), ties=ties)


def refuse_over_axes(model: ModelFacts, mesh: MeshSpec) -> None:
    """Refuse what PEFT does around a layer or model that the axes of this mesh divide.

    Raises: PlanError `unplanned-adapter`.
    """
    problems = [*unserved_over_stages(model)] if mesh.ranks("pp") > 1 else []
    tokens = next((name for name in model.modules if name.endswith(TOKENS)), "")
    if tokens and mesh.ranks("tp") > 1:
        what = (
            f"{tokens} trains some rows of an embedding (trainable_token_indices), of which a rank of tp stores a shard"
        )
        fix = 'modules_to_save=["embed_tokens"], which trains all rows; or a mesh without tp'
        problems.append(Problem("unplanned-adapter", what, fix=fix))
    if problems:
        raise PlanError(*problems)


def without_trained_rows(plan: Plan, model: ModelFacts) -> Plan:
    """The plan, on a mesh without tp, without the rules of embeddings of which some rows train; the same plan where
    there are none.

    Raises: PlanError `unplanned-adapter` for a head that has such rows too, as one that is tied to its embedding.
    """
    trained = [name.removesuffix(TOKENS) for name in model.modules if name.endswith(TOKENS)]
    if not trained:
        return plan

    def names_trained(rule: Rule) -> bool:
        return any(matches(pattern, name) for pattern in alternatives(rule.pattern) for name in trained)

    heads = [rule for rule in plan.rules if names_trained(rule) and rule.style.options.get("output") == "vocabulary"]
    if heads:
        what = f"{heads[0].pattern} trains some rows (trainable_token_indices), and a fused loss takes its weight alone"
        raise PlanError(Problem("unplanned-adapter", what, heads[0].where, fix="fuse_loss=False"))
    return replace(plan, rules=tuple(rule for rule in plan.rules if not names_trained(rule)), on_unclaimed="leave")


def renamed(plan: Plan, rename: Callable[[str], str]) -> Plan:
    """The plan with every name and pattern replaced; what becomes empty stays empty."""

    def each(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(rename(name) for name in names)

    cuts = plan.cuts
    return replace(
        plan,
        rules=tuple(replace(rule, pattern=rename(rule.pattern)) for rule in plan.rules),
        local=tuple(replace(item, pattern=rename(item.pattern)) for item in plan.local),
        local_inputs=tuple(replace(item, pattern=rename(item.pattern)) for item in plan.local_inputs),
        ties=tuple(replace(tie, members=each(tie.members)) for tie in plan.ties),
        zero_units=each(plan.zero_units),
        recompute_units=each(plan.recompute_units),
        attention=tuple(replace(rule, pattern=rename(rule.pattern)) for rule in plan.attention),
        sequences=plan.sequences and rename(plan.sequences),
        regions=tuple(
            replace(region, layers=rename(region.layers), leave=region.leave and rename(region.leave))
            for region in plan.regions
        ),
        cuts=cuts
        and replace(
            cuts,
            layers=cuts.layers if cuts.layers == LONGEST_LIST else rename(cuts.layers),
            first=each(cuts.first),
            last=each(cuts.last),
            every=each(cuts.every),
            skips=tuple((rename(source), rename(target)) for source, target in cuts.skips),
        ),
    )


@dataclass(frozen=True)
class _Matched:
    """The names of the layers that a pattern matches: with adapters, with copies, and stock ones."""

    adapted: tuple[str, ...]
    copied: tuple[str, ...]
    stock: tuple[str, ...]


class _Rules:
    """Makes the rules of the parts of layers, and collects problems on the way."""

    def __init__(self, model: ModelFacts, adapted: Sequence[str], copied: Sequence[str]):
        self.model, self.adapted, self.copied = model, dict.fromkeys(adapted), dict.fromkeys(copied)
        self.problems: list[Problem] = []
        self.planned: set[str] = set()

    def of(self, rule: Rule) -> Iterator[Rule]:
        """The rules in the place of one."""
        if is_default(rule.pattern) or rule.style.traits.wraps:  # the plan is for some of the adapters already
            named = [name for name in self.adapted if matches(rule.pattern, name)]
            for name in named if is_default(rule.pattern) else ():
                yield from self._parts_of_default(rule, name)
            self.planned |= {*named}
            yield rule
            return
        for pattern in alternatives(rule.pattern):
            yield from self._rules_of_pattern(replace(rule, pattern=pattern))

    def _parts_of_default(self, rule: Rule, name: str) -> Iterator[Rule]:
        """Of a layer that a default alone names: its wrapper may read parameters of what is inside. One that no plan
        serves is left as the default has it."""
        known = len(self.problems)
        parts = [] if name in self.planned else [*self._parts(rule, name, name)]
        if len(self.problems) == known:
            yield from parts
        del self.problems[known:]

    def _rules_of_pattern(self, rule: Rule) -> Iterator[Rule]:
        matched = self._match(rule.pattern)
        if not matched.adapted and not matched.copied:
            yield from self._rules_of_parameter(rule)
            return
        layers = (*matched.adapted, *matched.copied)
        self.planned |= {*layers}
        if not matched.stock and len({*map(self._structure, layers)}) == 1:  # the pattern stands for all of them
            yield from self._rules_of_layer(rule, rule.pattern, layers[0])
            return
        for name in layers:
            yield from self._rules_of_layer(rule, name, name)
        yield from (replace(rule, pattern=name) for name in matched.stock)

    def _rules_of_layer(self, rule: Rule, pattern: str, name: str) -> Iterator[Rule]:
        """name: of the first of the layers that `pattern` stands for."""
        return self._copies(rule, pattern) if name in self.copied else self._parts(rule, pattern, name)

    def _match(self, pattern: str) -> _Matched:
        names = [name for name in self.model.module_fqns if matches(pattern, name)]
        stock = tuple(name for name in names if name not in self.adapted and name not in self.copied)
        return _Matched(
            tuple(name for name in names if name in self.adapted),
            tuple(name for name in names if name in self.copied),
            stock,
        )

    def _structure(self, name: str) -> tuple:
        """What the rules of a layer depend on besides its style."""
        children = tuple(key for key in _PARTS if self._has(name, key))
        inner = self._structure(f"{name}.{BASE}") if f"{name}.{BASE}" in self.adapted else ()
        return name in self.copied, children, self._scales_input(name), self._num_experts(name), inner

    def _has(self, name: str, key: str) -> bool:
        child = self.model.objects.get(f"{name}.{key}")
        return child is not None and any(True for _ in child.parameters())

    def _num_experts(self, name: str) -> int:
        """Of the stacked parameter that is adapted; 0 of any other layer."""
        return int(getattr(self.model.objects[name], "num_experts", 0) or 0)

    def _scales_input(self, name: str) -> bool:
        return bool(getattr(self.model.objects[name], "is_feedforward", False))

    # -- one layer, by its name or by the pattern of all that are alike -----------------------------------------------

    def _parts(self, rule: Rule, pattern: str, name: str) -> Iterator[Rule]:
        styles = adapter_styles(rule.style, scales_input=self._scales_input(name), num_experts=self._num_experts(name))
        unknown = self._unknown_parts(name, rule)
        if styles is None or unknown:
            self._refuse(name, unknown[0] if unknown else f"beside a layer that is `{rule.style}`")
            return
        yield replace(rule, pattern=pattern, style=StyleText("adapted"))
        if f"{name}.{BASE}" in self.adapted:  # one inside of the other, each for one parameter
            yield from self._parts(rule, f"{pattern}.{BASE}", f"{name}.{BASE}")
        else:
            yield replace(rule, pattern=f"{pattern}.{BASE}", style=styles.base)
        parts = [(key, styles.modules, f"{pattern}.{key}.*") for key in styles.modules]
        parts += [(key, styles.parameters, f"{pattern}.{key}.*") for key in styles.parameters]
        planned = {key for key, _, _ in parts}
        for key in _PARTS:
            if self._has(name, key) and key not in planned:
                self._refuse(name, f"{key}, beside a layer that is `{rule.style}`")
        yield from (replace(rule, pattern=where, style=of[key]) for key, of, where in parts if self._has(name, key))

    def _unknown_parts(self, name: str, rule: Rule) -> list[str]:
        """What is beside the layer that no plan can serve: other children with parameters, other classes, other
        variants of LoRA."""
        layer: Any = self.model.objects[name]
        known = (BASE, *_PARTS, *_WITHOUT_PARAMETERS)
        parts = [
            key for key, child in layer.named_children() if key not in known and any(True for _ in child.parameters())
        ]
        for key in ("lora_A", "lora_B"):
            for child in self.model.objects[f"{name}.{key}"].children() if self._has(name, key) else ():
                parts += (
                    [f"a {type(child).__name__} in {key}"]
                    if type(child).__module__ != "torch.nn.modules.linear"
                    else []
                )
        variants = {type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()}
        parts += sorted(variants - set(_VARIANTS))
        if hasattr(layer, "parameter_name") and not self._may_adapt_parameter(name, rule.style):
            parts.append(f"of its parameter {layer.parameter_name}")
        return parts

    def _may_adapt_parameter(self, name: str, style: StyleText) -> bool:
        """Whether the forward of the layer reads a parameter that is changed while it runs, as those of plain linears
        do not."""
        if adapts_parameters(style):
            return True
        layer = name
        while f"{layer}.{BASE}" in self.model.modules:
            layer = f"{layer}.{BASE}"
        return (
            self._num_experts(name) == 1 and self.model.modules[layer].kind == "other" and adapts_one_parameter(style)
        )

    def _refuse(self, name: str, what: str) -> None:
        kind = type(self.model.objects[name])
        self.problems.append(
            Problem(
                "unplanned-adapter",
                f"no plan serves an adapter of {generic(name)}: {what}",
                rows=(("adapter", f"{kind.__module__}.{kind.__name__}"),),
                fix=(
                    "LoRA, DoRA or IA3 on linears and embeddings with rules of their own; or merge the adapter before "
                    "the plan"
                ),
            )
        )

    def _copies(self, rule: Rule, pattern: str) -> Iterator[Rule]:
        yield replace(rule, pattern=f"{pattern}.{ORIGINAL}")
        yield replace(rule, pattern=f"{pattern}.{COPIES}.*", optional=True)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _rules_of_parameter(self, rule: Rule) -> Iterator[Rule]:
        """A rule that names no adapted layer: it may name a parameter of one, or a module inside of a copied one."""
        owner, _, key = rule.pattern.rpartition(".")
        names_modules = any(matches(rule.pattern, name) for name in self.model.module_fqns)
        matched = self._match(owner) if owner and not names_modules else _Matched((), (), ())
        if matched.adapted or matched.copied:
            names = [name for name in self.model.parameter_fqns if matches(rule.pattern, name)]
            yield from (replace(rule, pattern=name) for name in names)
            yield from (replace(rule, pattern=f"{name}.{BASE}.{key}") for name in matched.adapted)
            for name in matched.copied:
                yield replace(rule, pattern=f"{name}.{ORIGINAL}.{key}")
                yield replace(rule, pattern=f"{name}.{COPIES}.*.{key}", optional=True)
            return
        yield rule

    def parameter(self, name: str) -> str:
        """The name of a parameter of the stock model in the model with adapters."""
        owner, _, key = name.rpartition(".")
        if owner in self.adapted:
            return f"{owner}.{BASE}.{key}"
        return f"{owner}.{ORIGINAL}.{key}" if owner in self.copied else name

    def of_prompts(self, plan: Plan) -> Iterator[Rule]:
        """Learned prompts are full on every rank, outside of the model that PEFT wraps. plan: may have their rules
        already."""
        known = {rule.pattern for rule in plan.rules}
        names = [name for name in self.model.modules if name.partition(".")[0] == PROMPTS and name not in known]
        full = StyleText("replicate")
        yield from (Rule(name, full, "PEFT") for name in names if self.model.modules[name].shapes)

    def unplanned(self) -> Iterator[Problem]:
        """Layers with adapters that no rule names."""
        for name in self.adapted:
            if layer_name(name) not in self.planned and not self.problems and self._trains(name):
                self._refuse(name, "the plan has no rule for the layer")
                yield from self.problems

    def _trains(self, name: str) -> bool:
        return any(self._has(name, key) for key in _PARTS)


# -- learned prompts -------------------------------------------------------------------------------------------------
# Learned prompts of PEFT (prompt, P- and prefix tuning) over pipeline stages. The forward of PEFT's model computes
# them, around that of the stock model. The first stage has the module that makes them. What it returns for prefix
# tuning are keys and values of all layers, which the later stages get with the activations. Torch-free.


PROMPTS = "prompt_encoder"
"""The attribute of PEFT's model that has a module for each adapter with learned prompts."""

PREFIX_ENCODER = "PrefixEncoder"
"""The class of PEFT that makes keys and values of prefix tuning."""

_BEFORE_EMBEDDINGS = ("PromptEmbedding", "PromptEncoder")
"""Those that make embeddings, which stand before those of the tokens."""


def makes_prefixes(model: ModelFacts) -> bool:
    """Whether PEFT computes keys and values that stand before those of each layer (prefix tuning)."""
    return any(facts.class_name == PREFIX_ENCODER for facts in model.modules.values())


def prompt_encoders(model: ModelFacts) -> tuple[str, ...]:
    """The names of the modules that make prompts, one for each adapter."""
    return tuple(name for name in model.modules if name.count(".") == 1 and name.partition(".")[0] == PROMPTS)


def with_prompts(cuts: Cuts, model: ModelFacts, last_user: str) -> Cuts:
    """The cuts of a model with learned prompts; the same cuts where it has none.

    Args:
        cuts: complete: modules before and after the layers are named.
        last_user: the last unit that keys and values of prefixes are used in.
    """
    encoders = prompt_encoders(model)
    if not encoders:
        return cuts
    prefixes = [name for name in encoders if model.modules[name].class_name == PREFIX_ENCODER]
    last = tuple(name for name in cuts.last if name.partition(".")[0] != PROMPTS)
    skips = tuple((name, last_user) for name in prefixes)
    return replace(cuts, first=(*encoders, *cuts.first), last=last, skips=(*cuts.skips, *skips))


def unserved_over_stages(model: ModelFacts) -> Iterator[Problem]:
    """Problems for prompts of other kinds, and of a model with an encoder and a decoder, over pipeline stages."""
    for name in prompt_encoders(model):
        kind, config = model.modules[name].class_name, model.root.peft_config[name.rpartition(".")[2]]
        if kind not in (*_BEFORE_EMBEDDINGS, PREFIX_ENCODER):
            what = f"{name} is a {kind}, of which no pipeline stage but the first has what PEFT's forward reads"
        elif config.num_transformer_submodules != 1:
            what = f"{name} makes prompts of an encoder and a decoder, which are on different pipeline stages"
        else:
            continue
        yield Problem("unplanned-adapter", what, fix="a mesh without pp; or LoRA, which every mesh serves")


def adapted_layers_of(module: Any) -> list[Any]:
    """PEFT's modules that call a layer and its adapters, of all stages."""
    return [inner for inner in module.modules() if BASE in inner._modules]


def active_adapters(layers: Sequence[Any]) -> str:
    """Which adapters layers add: these decide which activations have gradients, and are the same on all stages."""
    names = {(*layer.active_adapters, layer.disable_adapters) for layer in layers if hasattr(layer, "disable_adapters")}
    return str(sorted(map(str, names)))
