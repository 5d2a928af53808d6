"""Plans to and from the dict form of `transformers`: {pattern of the base model: word}.

Such a dict has less than a plan file: no head counts, no region for sequence parallelism, no attributes that become
local, no rules for replicated parameters. The import adds what follows from the model and reports what is missing. The
export refuses a rule that has no word in `transformers`; it never writes a weaker one.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelize.base.errors import PlanError, Problem
from parallelize.base.files.yaml_nodes import as_scalar
from parallelize.plan.inner_experts import USUAL, words_of_weights
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.schema import SCHEMA_VERSION, Plan, Rule
from parallelize.plan.styles.notation import EXPERT_WEIGHT_WORDS, EXPERT_WORDS, parse_style, transformers_word
from parallelize.plan.styles.style import STYLES, StyleText

HEAD = {"lm_head": "colwise_gather_output"}  # the rule that `transformers` classes add for their head

_VOCABULARY = "colwise(output=vocabulary)"
_EMBEDDING = "embed_tokens"  # `transformers` shards a base model's embedding of this name without a rule
_BLOCK_NORMS = "{input,post_attention,pre_feedforward,post_feedforward}_layernorm"
_PROJECTIONS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"}
_OUTPUTS = ("o_proj", "out_proj", "dense")
_COMMENTS_AT = 66  # column at which comments are aligned; on longer lines they follow the text
# attributes of attention that a forward may use in a view -> the size that they are sharded with
ATTRIBUTES = {
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_key_value_groups": "heads/kv_heads",
}


def words_of(config: Any) -> dict[str, str]:
    """The `base_model_tp_plan` of a config or its class; where that names no experts, with those of its
    `base_model_ep_plan`."""
    words = dict(getattr(config, "base_model_tp_plan", None) or {})
    if not any(word in EXPERT_WORDS for word in words.values()):
        over_ep = ("ep_dispatch_experts", *EXPERT_WEIGHT_WORDS["ep_dispatch_experts"].values())
        more = getattr(config, "base_model_ep_plan", None) or {}
        words |= {pattern: word for pattern, word in more.items() if word in over_ep}
    return words


def read_words(words: Mapping[str, Any], about: str) -> dict[str, StyleText]:
    """The styles of a dict of `transformers` words, in its order. A rule for experts covers their parameters.

    Raises: PlanError `untranslatable-plan`, with every word that has no equivalent style.
    """
    styles, unknown = {}, []
    experts = {pattern for pattern, word in words.items() if word in EXPERT_WORDS}
    for pattern, word in words.items():
        if pattern.rpartition(".")[0] in experts:
            continue
        try:
            styles[pattern] = parse_style(word if isinstance(word, str) else json.dumps(word), pattern)
        except PlanError:
            unknown.append((pattern, str(word)))
    if unknown:
        what = f"{about} has a plan with words that have no equivalent style"
        fix = "write a plan for it; known words: " + ", ".join(STYLES)
        raise PlanError(Problem("untranslatable-plan", what, rows=tuple(unknown), fix=fix))
    return styles


def full_words(words: Mapping[str, str], prefix: str, head: Mapping[str, str], embedding: bool) -> dict[str, str]:
    """A base model's dict with full names, and with the rules that `transformers` adds implicitly."""
    full = {prefix + pattern: word for pattern, word in words.items()} | dict(head)
    if embedding:
        full.setdefault(prefix + _EMBEDDING, "embedding_rowwise")
    gathered = ("colwise_gather_output", "colwise_rep")
    return {
        pattern: _VOCABULARY if pattern == "lm_head" and word in gathered else word for pattern, word in full.items()
    }


# -- in ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignPlan:
    """A dict of `transformers` words, and what is known of its model.

    Attributes:
        words: the dict, as `base_model_tp_plan` has it: names inside the base model.
        source: where the dict comes from, for messages.
        model_type: of the config; empty where unknown.
        base: fqn of the base model in the model with a head; empty where they are the same module.
        head: the rules of the model's class for modules outside the base model.
        fields: of the config.
        parameters: fqns of all parameters; None where no model was built.
        counts: module to attribute to integer, for the attributes in `ATTRIBUTES`; numbers in names are `*`.
        no_model_reason: why no model was built.
    """

    words: Mapping[str, str]
    source: str
    model_type: str = ""
    base: str = "model"
    head: Mapping[str, str] = field(default_factory=lambda: HEAD)
    fields: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] | None = None
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    no_model_reason: str = "no model was built"

    @property
    def prefix(self) -> str:
        return f"{self.base}." if self.base else ""


@dataclass(frozen=True)
class Imported:
    """The text of a plan file, and notes on what it lacks."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    pattern: str
    style: str
    comment: str = ""


def import_plan(foreign: ForeignPlan) -> Imported:
    """A plan file equivalent to the dict, with heads and replicated parameters where these follow from the model.

    Raises: PlanError `untranslatable-plan`, and the errors of `parse_plan` for names that are not patterns.
    """
    words = full_words(foreign.words, foreign.prefix, foreign.head, embedding=False)
    styles = read_words(words, foreign.source)
    units = _units(foreign, styles)
    lines = [_line(pattern, str(words[pattern]), style, units.get(pattern)) for pattern, style in styles.items()]
    base = [line for line in lines if line.pattern.rstrip("?") not in foreign.head]
    base = [line if _matches(foreign, line.pattern) else _optional(line) for line in base]
    head = [_optional(line) for line in lines if line.pattern in foreign.head]
    replicated, undecided = _replicated(foreign, styles)
    lines = [*_embedding(foreign, styles), *base, *replicated, *head]
    local = _local(foreign, units)
    groups = "heads/kv_heads" in "".join(local)
    gathered = bool(styles) and all(_is_gathered(style) for pattern, style in styles.items() if "att" in pattern)
    notes = tuple(_notes(foreign, bool(units) or gathered, bool(local) or gathered, undecided))
    text = "\n".join([*_head_lines(foreign, notes), *_sizes(foreign, units, groups), *_rules(lines), *local]) + "\n"
    parse_plan(text, source=f"the plan out of {foreign.source}")
    return Imported(text, notes)


def _line(pattern: str, word: str, style: StyleText, unit: str | None) -> _Line:
    shown = f"{style}({unit})" if unit else str(style)
    word = "colwise_gather_output" if pattern == "lm_head" and word == _VOCABULARY else " ".join(word.split())
    return _Line(pattern, shown, word if word != shown else "")


def _matches(foreign: ForeignPlan, pattern: str) -> bool:
    """Whether the pattern matches something in the model; `transformers` accepts patterns that do not."""
    if foreign.parameters is None:
        return True
    depth = pattern.count(".") + 1
    return any(matches(pattern, ".".join(name.split(".")[:depth])) for name in foreign.parameters)


def _optional(line: _Line) -> _Line:
    return replace(line, pattern=line.pattern + "?")


def _units(foreign: ForeignPlan, styles: Mapping[str, StyleText]) -> dict[str, str]:
    """Pattern to the size whose units are never split: q, k, v and the output projection of each attention block."""
    if not isinstance(foreign.fields.get("num_attention_heads"), int):
        return {}
    kv = isinstance(foreign.fields.get("num_key_value_heads"), int)
    units: dict[str, str] = {}
    for block in {pattern.rpartition(".")[0] for pattern in styles}:
        inputs = [f"{block}.{name}" for name in _PROJECTIONS]
        outputs = [name for name in (f"{block}.{name}" for name in _OUTPUTS) if str(styles.get(name)) == "rowwise"]
        if len(outputs) == 1 and all(str(styles.get(name)) == "colwise" for name in inputs):
            sizes = _PROJECTIONS.values() if kv else ("heads",) * 3
            units |= dict(zip(inputs, sizes, strict=True)) | {outputs[0]: "heads"}
    return units


def _embedding(foreign: ForeignPlan, styles: Mapping[str, StyleText]) -> Iterator[_Line]:
    """The rule for the embedding, which `transformers` shards without one."""
    name = foreign.prefix + _EMBEDDING
    known = foreign.parameters is None or f"{name}.weight" in foreign.parameters
    if known and name not in styles:
        line = _Line(name, "embedding", "implicit there: embedding_rowwise")
        yield line if foreign.parameters is not None else _optional(line)


def _replicated(foreign: ForeignPlan, styles: Mapping[str, StyleText]) -> tuple[list[_Line], list[str]]:
    """(rules for what `transformers` replicates implicitly, modules for which it cannot be known)."""
    comment = "implicit there"
    if foreign.parameters is None:
        names = [f"{foreign.prefix}layers.*.{_BLOCK_NORMS}", f"{foreign.prefix}norm", "score"]
        return [_optional(_Line(name, "replicate", comment)) for name in names], []
    claimed = {*styles, foreign.prefix + _EMBEDDING, "lm_head"}
    lines: dict[str, _Line] = {}
    undecided: dict[str, None] = {}
    for name in map(generic, foreign.parameters):
        owner = name.rpartition(".")[0]
        if any(matches(pattern, part) for pattern in claimed for part in (owner, name)):
            continue
        if _has_sharded_siblings(owner, styles):
            undecided[owner or name] = None
        else:
            lines[owner or name] = _Line(owner or name, "replicate", comment)
    return list(lines.values()), list(undecided)


def _has_sharded_siblings(owner: str, styles: Mapping[str, StyleText]) -> bool:
    """Whether a module most likely runs on sharded activations: a sibling of column and row linears, as in
    `resolve`."""
    for parent in filter(None, (owner, owner.rpartition(".")[0])):
        siblings = [style for pattern, style in styles.items() if pattern.rpartition(".")[0] == parent]
        gathered = any(style.options.get("output") == "full" for style in siblings)
        if _splits_and_sums(siblings) and not gathered:
            return True
    return False


def _splits_and_sums(styles: Iterable[StyleText]) -> bool:
    traits = [style.traits for style in styles]
    return any(trait.splits_output for trait in traits) and any(trait.sums_output for trait in traits)


def _local(foreign: ForeignPlan, units: Mapping[str, str]) -> list[str]:
    """Lines of `local:` for the head counts that attention modules store."""
    known = set(units.values())
    lines = []
    for block in sorted({pattern.rpartition(".")[0] for pattern in units}):
        attributes = {name: size for name, size in ATTRIBUTES.items() if name in foreign.counts.get(block, {})}
        local = ", ".join(f"{name}: {size}" for name, size in attributes.items() if set(size.split("/")) <= known)
        lines += [f"  {as_scalar(block)}: {{{local}}}"] if local else []
    return ["local:", *lines] if lines else []


def _sizes(foreign: ForeignPlan, units: Mapping[str, str], groups: bool) -> Iterator[str]:
    """Lines of `sizes:`. `groups`: the ratio of heads becomes local, so that key/value heads can be replicated."""
    if not units:
        return
    yield "sizes:"
    yield "  heads: num_attention_heads"
    if "kv_heads" in units.values():
        name = "num_key_value_heads"
        yield f"  kv_heads: {{from: {name}, below_tp: replicate}}" if groups else f"  kv_heads: {name}"


def _head_lines(foreign: ForeignPlan, notes: Iterable[str]) -> Iterator[str]:
    yield f"# Imported from the tensor-parallel plan of {' '.join(foreign.source.split())}; comments are its words."
    yield from (f"# - {note}" for note in notes)
    yield f"schema_version: {SCHEMA_VERSION}"
    if foreign.model_type:
        yield f"model_type: {as_scalar(foreign.model_type)}"
    if foreign.base:
        yield f"base: {as_scalar(foreign.base)}"


def _rules(lines: Iterable[_Line]) -> Iterator[str]:
    yield "tensor_parallel:"
    texts = [(f"  {as_scalar(line.pattern)}: {line.style}", line.comment) for line in lines]
    width = max((len(text) for text, comment in texts if comment and len(text) <= _COMMENTS_AT), default=0)
    for text, comment in texts:
        yield f"{text:<{width}}  # {comment}" if comment else text


def _is_gathered(style: StyleText) -> bool:
    """Whether activations are full between modules, so that heads and attributes keep their values."""
    return (style.traits.replicates and not style.traits.by_token) or "full" in (
        style.options.get("input"),
        style.options.get("output"),
    )


def _notes(foreign: ForeignPlan, heads: bool, local: bool, undecided: list[str]) -> Iterator[str]:
    """What the dict lacks and does not follow from the model."""
    if not foreign.model_type:
        yield "the model type is unknown: name the plan where it is used, or add `model_type:`"
    if not heads:
        yield "head counts: none are known, so a split inside a head is not detected; add `sizes:`"
    elif not local:
        yield (
            "key/value heads are not replicated where there are fewer of them than ranks: that needs `local:` "
            "attributes"
        )
    yield "sequence parallelism: there is no region; add `sequence_parallel:`, `gather` rules and `sequence` norms"
    if not local:
        yield "attributes that become local: add `local:` where the forward uses head counts in views"
    if foreign.parameters is None:
        yield f"{foreign.no_model_reason}: `?` marks common names; `parallelize_module` reports what is missing"
    for name in undecided:
        yield (
            f"UNDECIDED {name}: a sibling of sharded linears; give it `replicate`, `replicate(gradient=partial)` or "
            "`shard`"
        )


# -- out ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """The dict, notes on what it leaves to `transformers`, and the rules that have no equivalent word."""

    words: dict[str, str]
    notes: tuple[str, ...]
    refused: tuple[Problem, ...]


def export_plan(plan: Plan, experts: Sequence[Mapping[str, bool]] = (USUAL,)) -> Exported:
    """The plan as `base_model_tp_plan`: rules of the base model, in the words of `transformers`.

    experts: of each model that the words are for, how it stores the weights of its experts: see `words_of_weights`.
    """
    words: dict[str, str] = {}
    refused: list[Problem] = []
    for rule in plan.rules:
        for pattern in alternatives(rule.pattern):
            word, reason = _word(plan, rule, pattern)
            weights: dict[str, str] = {}
            if word in EXPERT_WORDS:
                weights, reason = words_of_weights(experts)
            if reason:
                refused.append(Problem("no-equal-word", f"{pattern}: {rule.style}: {reason}", rule.where))
            elif word:
                name = _name_in_base(plan, pattern)
                words |= {name: word} | {f"{name}.{key}": of_weight for key, of_weight in weights.items()}
    refused += _refused_attributes(plan)
    if plan.options.sequence_parallel:
        what = "sequence parallelism is on by default in this plan, and `transformers` has none"
        refused.append(Problem("no-equal-word", what, plan.source, fix="remove it from `defaults`"))
    return Exported(words, tuple(_dropped(plan)), tuple(refused))


def exports_experts(plan: Plan) -> bool:
    """Whether the words of a plan depend on how the weights of experts are stored."""
    return any(_word(plan, rule, rule.pattern)[0] in EXPERT_WORDS for rule in plan.rules)


def _name_in_base(plan: Plan, pattern: str) -> str:
    return pattern.removeprefix(f"{plan.base}.") if plan.base else pattern


def _word(plan: Plan, rule: Rule, pattern: str) -> tuple[str, str]:
    """(the word, the reason why there is none); both are empty where `transformers` does the same without a rule."""
    style = rule.style
    outside = bool(plan.base) and not pattern.startswith(f"{plan.base}.")
    if style.traits.shares_input or (style.traits.replicates and _is_implicit(plan, style, pattern)):
        return "", ""
    if outside:
        is_full = style.keeps_vocabulary or style.options.get("output") == "full"
        is_head = pattern in HEAD and style.traits.splits_output and is_full
        return "", "" if is_head else "outside the base model the model's class decides"
    if any("*" in part and part != "*" for part in pattern.split(".")):
        return "", "a `*` of `transformers` matches a number only"
    if style.traits.looks_up and _name_in_base(plan, pattern) == _EMBEDDING:
        return "", ""
    if len(style.unit) > 1:
        return "", "no word is for chunks of several sizes in one weight"
    word = transformers_word(_bare(style))
    return (word, "") if word else ("", "no word of `transformers` is equivalent")


def _is_implicit(plan: Plan, style: StyleText, pattern: str) -> bool:
    """Whether no rule means the same: what no rule names is replicated, except the embedding, which is sharded."""
    return style.options.get("gradient") != "partial" and _name_in_base(plan, pattern) != _EMBEDDING


def _bare(style: StyleText) -> StyleText:
    """The style without the options that change no result in `transformers`: units, overlap, flattened tokens."""
    options = {
        key: value
        for key, value in style.options.items()
        if key not in ("unit", "overlap", "beside") and value != "tokens"
    }
    return StyleText("replicate" if style.traits.by_token else style.word, options)


def _refused_attributes(plan: Plan) -> Iterator[Problem]:
    """Attributes that would have to become local. A ratio of two sharded sizes keeps its value, so it is accepted."""
    for item in plan.local:
        if not item.divide_by:
            what = f"local {item.pattern}.{item.attribute}: {item.size}: attributes stay as they are there"
            yield Problem("no-equal-word", what, item.where)


def _dropped(plan: Plan) -> Iterator[str]:
    """Notes on what `transformers` does by itself or does not have."""
    if any(pattern in HEAD for rule in plan.rules for pattern in alternatives(rule.pattern)):
        yield "lm_head: the classes of `transformers` have a rule for it (_tp_plan): gathered, without loss parallelism"
    if any(rule.style.traits.shares_input or rule.style.traits.by_token for rule in plan.rules) or plan.regions:
        yield (
            "`transformers` has no sequence parallelism; each column linear reduces its input's gradient, `gather` "
            "does it once"
        )
    if any(rule.style.unit for rule in plan.rules):
        counts = ", ".join(f"{name} ({size.source})" for name, size in plan.sizes.items())
        yield f"`transformers` does not check that tp divides {counts}"
    if any(size.replicate_below_tp for size in plan.sizes.values()):
        yield "`transformers` does not replicate key/value heads where there are fewer of them than ranks"
    sections = {"pipeline": plan.cuts, "ties": plan.ties, "zero": plan.zero_units, "recompute": plan.recompute_units}
    for name, section in sections.items():
        if section:
            yield f"`{name}` is not tensor parallelism and is dropped"
