"""Plans to and from the dict form of `transformers`: {pattern of the base model: word}.

Such a dict says less than a plan file: no head counts, no region for sequence parallelism, no attributes that become
local, nothing of what stays whole. So on the way in, what follows from the model is filled in and the rest is named; on
the way out, a rule whose meaning has no word there is an error, never a weaker word.

Floor 2: torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parallelize.errors import PlanError, Problem
from parallelize.plan.load import parse_plan
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.schema import SCHEMA_VERSION, Plan, Rule
from parallelize.styles.text import WORDS, StyleText, parse_style, transformers_word

HEAD = {"lm_head": "colwise_gather_output"}  # what the classes of `transformers` add for their head

_VOCABULARY = "colwise(output=vocabulary)"
_EMBEDDING = "embed_tokens"  # `transformers` splits a base model's embedding of this name by itself
_BLOCK_NORMS = "{input,post_attention,pre_feedforward,post_feedforward}_layernorm"
_PROJECTIONS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"}
_OUTPUTS = ("o_proj", "out_proj", "dense")
_COMMENTS_AT = 66  # column to which comments are lined up; longer lines have theirs where they end
# attributes of attention that a forward may view by -> the size with which they shrink
ATTRIBUTES = {
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_key_value_groups": "heads/kv_heads",
}
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*[.][\w.*{},]*\??\Z|[A-Za-z]\w{3,}\??\Z")


def read_words(words: Mapping[str, Any], about: str) -> dict[str, StyleText]:
    """The styles that a dict of `transformers` words asks for, in its order.

    Raises: PlanError `untranslatable-plan` naming every word that has no equal here.
    """
    styles, unknown = {}, []
    for pattern, word in words.items():
        try:
            styles[pattern] = parse_style(word if isinstance(word, str) else json.dumps(word), pattern)
        except PlanError:
            unknown.append((pattern, str(word)))
    if unknown:
        what = f"{about} carries a plan with words that have no equal here"
        fix = "write a plan for it; words known: " + ", ".join(WORDS)
        raise PlanError(Problem("untranslatable-plan", what, rows=tuple(unknown), fix=fix))
    return styles


def whole_words(words: Mapping[str, str], prefix: str, head: Mapping[str, str], embedding: bool) -> dict[str, str]:
    """A base model's dict with all names in full, and with the rules that `transformers` adds to it unsaid."""
    whole = {prefix + pattern: word for pattern, word in words.items()} | dict(head)
    if embedding:
        whole.setdefault(prefix + _EMBEDDING, "embedding_rowwise")
    gathered = ("colwise_gather_output", "colwise_rep")
    return {
        pattern: _VOCABULARY if pattern == "lm_head" and word in gathered else word for pattern, word in whole.items()
    }


# -- in -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignPlan:
    """A dict of words and what is known of its model.

    Attributes:
        words: the dict, as `base_model_tp_plan` has it: names inside the base model.
        base: where the base model stands in the model with a head; empty where they are one.
        head: what the model's class says of the modules outside.
        fields: of the config.
        parameters: all names of the model's parameters; None where there was no model to ask.
        counts: module -> attribute -> whole number, of the attributes in `ATTRIBUTES`; in names, numbers are `*`.
        unasked: why there was no model to ask.
    """

    words: Mapping[str, str]
    source: str
    model_type: str = ""
    base: str = "model"
    head: Mapping[str, str] = field(default_factory=lambda: HEAD)
    fields: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] | None = None
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unasked: str = "no model was looked at"

    @property
    def prefix(self) -> str:
        return f"{self.base}." if self.base else ""


@dataclass(frozen=True)
class Imported:
    """The text of a plan file, and what a reader should know of it."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    pattern: str
    style: str
    comment: str = ""


def import_plan(foreign: ForeignPlan) -> Imported:
    """A plan file that says what the dict says, with heads and what stays whole where these follow from the model.

    Raises: PlanError `untranslatable-plan`, and what the strict loader finds in names that are no patterns.
    """
    words = whole_words(foreign.words, foreign.prefix, foreign.head, embedding=False)
    styles = read_words(words, foreign.source)
    units = _units(foreign, styles)
    said = [_line(pattern, str(words[pattern]), style, units.get(pattern)) for pattern, style in styles.items()]
    inner = [line if _matches(foreign, line.pattern) else _optional(line) for line in said]
    inner = [line for line in inner if line.pattern.rstrip("?") not in foreign.head]
    outer = [_optional(line) for line in said if line.pattern in foreign.head]
    added, undecided = _whole_parameters(foreign, styles)
    lines = [*_embedding(foreign, styles), *inner, *added, *outer]
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
    """Whether the pattern names something in the model; `transformers` lets it pass where it does not."""
    if foreign.parameters is None:
        return True
    depth = pattern.count(".") + 1
    return any(matches(pattern, ".".join(name.split(".")[:depth])) for name in foreign.parameters)


def _optional(line: _Line) -> _Line:
    return replace(line, pattern=line.pattern + "?")


def _units(foreign: ForeignPlan, styles: Mapping[str, StyleText]) -> dict[str, str]:
    """Pattern -> size that is never cut: q, k, v of a block whose output projection takes the heads as they come."""
    if not isinstance(foreign.fields.get("num_attention_heads"), int):
        return {}
    kv = isinstance(foreign.fields.get("num_key_value_heads"), int)
    units: dict[str, str] = {}
    for block in {pattern.rpartition(".")[0] for pattern in styles}:
        ins = [f"{block}.{name}" for name in _PROJECTIONS]
        outs = [name for name in (f"{block}.{name}" for name in _OUTPUTS) if str(styles.get(name)) == "rowwise"]
        if len(outs) == 1 and all(str(styles.get(name)) == "colwise" for name in ins):
            sizes = _PROJECTIONS.values() if kv else ("heads",) * 3
            units |= dict(zip(ins, sizes, strict=True)) | {outs[0]: "heads"}
    return units


def _embedding(foreign: ForeignPlan, styles: Mapping[str, StyleText]) -> Iterator[_Line]:
    """`transformers` splits the embedding without being told."""
    name = foreign.prefix + _EMBEDDING
    known = foreign.parameters is None or f"{name}.weight" in foreign.parameters
    if known and name not in styles:
        line = _Line(name, "embedding", "unsaid there: embedding_rowwise")
        yield line if foreign.parameters is not None else _optional(line)


def _whole_parameters(foreign: ForeignPlan, styles: Mapping[str, StyleText]) -> tuple[list[_Line], list[str]]:
    """(rules for what `transformers` leaves whole without saying so, modules for which that cannot be told)."""
    comment = "unsaid there"
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
        if _beside_shards(owner, styles):
            undecided[owner or name] = None
        else:
            lines[owner or name] = _Line(owner or name, "replicate", comment)
    return list(lines.values()), list(undecided)


def _beside_shards(owner: str, styles: Mapping[str, StyleText]) -> bool:
    """Whether a module stands where activations are split: beside column and row linears, as `resolve` has it."""
    for place in filter(None, (owner, owner.rpartition(".")[0])):
        around = [style for pattern, style in styles.items() if pattern.rpartition(".")[0] == place]
        gathered = any(style.options.get("output") == "full" for style in around)
        if {"colwise", "rowwise"} <= {style.word for style in around} and not gathered:
            return True
    return False


def _local(foreign: ForeignPlan, units: Mapping[str, str]) -> list[str]:
    """Lines of `local:` for the counts of heads that the attention holds."""
    known = set(units.values())
    lines = []
    for block in sorted({pattern.rpartition(".")[0] for pattern in units}):
        held = {name: size for name, size in ATTRIBUTES.items() if name in foreign.counts.get(block, {})}
        local = ", ".join(f"{name}: {size}" for name, size in held.items() if set(size.split("/")) <= known)
        lines += [f"  {_key(block)}: {{{local}}}"] if local else []
    return ["local:", *lines] if lines else []


def _sizes(foreign: ForeignPlan, units: Mapping[str, str], groups: bool) -> Iterator[str]:
    """`groups`: whether the ratio of heads becomes local, so that few key/value heads can be replicated."""
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
        yield f"model_type: {_key(foreign.model_type)}"
    if foreign.base:
        yield f"base: {_key(foreign.base)}"


def _rules(lines: Iterable[_Line]) -> Iterator[str]:
    yield "tensor_parallel:"
    texts = [(f"  {_key(line.pattern)}: {line.style}", line.comment) for line in lines]
    width = max((len(text) for text, comment in texts if comment and len(text) <= _COMMENTS_AT), default=0)
    for text, comment in texts:
        yield f"{text:<{width}}  # {comment}" if comment else text


def _key(text: str) -> str:
    """Text that YAML reads back as this text, quoted where it might not."""
    return text if _PLAIN_KEY.match(text) and text.lower() not in ("true", "false", "null") else json.dumps(text)


def _is_gathered(style: StyleText) -> bool:
    """Whether what flows between is whole, so that heads and attributes are what they were."""
    return style.word == "replicate" or "full" in (style.options.get("input"), style.options.get("output"))


def _notes(foreign: ForeignPlan, heads: bool, local: bool, undecided: list[str]) -> Iterator[str]:
    """What a dict of words cannot say and what did not follow from the model either."""
    if not foreign.model_type:
        yield "no model type is known: name the plan where it is used, or add `model_type:`"
    if not heads:
        yield "head counts: it names none, and none follow from it, so a cut inside a head is not noticed; add `sizes:`"
    elif not local:
        yield "key/value heads are not replicated where there are fewer than ranks: that needs `local:` attributes"
    yield "sequence parallelism: no region is named; add `sequence_parallel:`, `gather` rules and `sequence` norms"
    if not local:
        yield "attributes that become local: add `local:` where the forward views by head counts"
    if foreign.parameters is None:
        yield f"{foreign.unasked}: `?` marks names that are usual; `parallelize_module` names what is missing"
    for name in undecided:
        yield f"UNDECIDED {name}: beside split linears; give it `replicate`, `replicate(gradient=partial)` or `shard`"


# -- out ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """The dict, what of the plan it leaves to `transformers`, and the rules that have no equal there."""

    words: dict[str, str]
    notes: tuple[str, ...]
    refused: tuple[Problem, ...]


def export_plan(plan: Plan) -> Exported:
    """The plan as `base_model_tp_plan`: rules of the base model, in the words of `transformers`."""
    words: dict[str, str] = {}
    refused: list[Problem] = []
    for rule in plan.rules:
        for pattern in alternatives(rule.pattern):
            word, why = _word(plan, rule, pattern)
            if why:
                refused.append(Problem("no-equal-word", f"{pattern}: {rule.style}: {why}", rule.where))
            elif word:
                words[_inside(plan, pattern)] = word
    refused += _refused_attributes(plan)
    if plan.sequence_parallel:
        why = "sequence parallelism is on by default in this plan, and there is none there"
        refused.append(Problem("no-equal-word", why, plan.source, fix="remove it from `defaults`"))
    return Exported(words, tuple(_left_out(plan)), tuple(refused))


def _inside(plan: Plan, pattern: str) -> str:
    return pattern.removeprefix(f"{plan.base}.") if plan.base else pattern


def _word(plan: Plan, rule: Rule, pattern: str) -> tuple[str, str]:
    """(the word to write, why there is none): both empty where `transformers` does it unsaid."""
    style = rule.style
    outside = bool(plan.base) and not pattern.startswith(f"{plan.base}.")
    if style.word == "gather" or (style.word in ("sequence", "replicate") and _is_unsaid(plan, style, pattern)):
        return "", ""
    if outside:
        fine = pattern in HEAD and style.word == "colwise" and style.options.get("output") in ("full", "vocabulary")
        return "", "" if fine else "stands outside the base model, where the class of the model decides"
    if any("*" in part and part != "*" for part in pattern.split(".")):
        return "", "a `*` there stands for a number and nothing else"
    if style.word == "embedding" and _inside(plan, pattern) == _EMBEDDING:
        return "", ""
    if len(style.unit) > 1:
        return "", "chunks of several sizes in one weight cannot be told there"
    word = transformers_word(_bare(style))
    return (word, "") if word else ("", "no word there means this")


def _is_unsaid(plan: Plan, style: StyleText, pattern: str) -> bool:
    """Whether silence means the same: what is not named stays whole, but for the embedding, which is split unsaid."""
    return style.options.get("gradient") != "partial" and _inside(plan, pattern) != _EMBEDDING


def _bare(style: StyleText) -> StyleText:
    """Without what changes no result there: the unit that a cut may not divide, overlap, the shape of tokens."""
    kept = {key: value for key, value in style.options.items() if key not in ("unit", "overlap") and value != "tokens"}
    return StyleText("replicate" if style.word == "sequence" else style.word, kept)


def _refused_attributes(plan: Plan) -> Iterator[Problem]:
    """A ratio of sizes that shrink alike stays as it is; anything else would have to change, which nothing does there."""
    for item in plan.local:
        if not item.divide_by:
            what = f"local {item.pattern}.{item.attribute}: {item.size}: attributes stay as they are there"
            yield Problem("no-equal-word", what, item.where)


def _left_out(plan: Plan) -> Iterator[str]:
    if any(pattern in HEAD for rule in plan.rules for pattern in alternatives(rule.pattern)):
        yield "lm_head: the classes of `transformers` say it themselves (_tp_plan), gathered, without loss parallelism"
    if any(rule.style.word in ("gather", "sequence") for rule in plan.rules) or plan.region:
        yield "no sequence parallelism there; each column linear reduces its own gradient, where `gather` does it once"
    if any(rule.style.unit for rule in plan.rules):
        counts = ", ".join(f"{name} ({size.source})" for name, size in plan.sizes.items())
        yield f"nothing checks there that tp divides {counts}"
    if any(size.replicate_below_tp for size in plan.sizes.values()):
        yield "nothing replicates key/value heads there where they are fewer than ranks"
    for name, given in (("pipeline", plan.cuts), ("ties", plan.ties), ("zero", plan.zero_units)):
        if given:
            yield f"`{name}` is not tensor parallelism and is left out"
    if plan.recompute_units:
        yield "`recompute` is not tensor parallelism and is left out"
