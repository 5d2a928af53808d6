"""Which modules mix the tokens of a sequence, and how they do it over `cp`, by the plan's `attention:`.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.base.errors import PlanError, Problem
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.schema import AttentionRule, Plan

_ATTENTION = ("attn", "attention")
_TOWERS = {"vision_config": ("vision", "visual"), "audio_config": ("audio", "speech")}


def attention_kinds(plan: Plan, model: ModelFacts) -> dict[str, str]:
    """Module fqn -> kind of its attention. Raises: PlanError `no-attention`, `unmatched-attention`, `two-attentions`."""
    if not plan.attention:
        raise PlanError(_no_attention(plan, model))
    kinds: dict[str, str] = {}
    for rule in plan.attention:
        names = list(_named(rule, plan, model))
        twice = [name for name in names if kinds.get(name, rule.kind) != rule.kind]
        if twice:
            what = f"{twice[0]} is {kinds[twice[0]]} by one line of `attention:` and {rule.kind} by another"
            raise PlanError(
                Problem("two-attentions", what, plan.source, fix="patterns that do not match the same module")
            )
        kinds |= dict.fromkeys(names, rule.kind)
    if not kinds:
        what = f"no line under `attention:` of the plan {plan.name} names a module of {type(model.root).__name__}"
        raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
    return kinds


def _no_attention(plan: Plan, model: ModelFacts) -> Problem:
    """Why a plan names no attention, as far as it is known: of models that cannot run over `cp` no line would help."""
    why, kind = _not_served(model), type(model.root).__name__
    if why:
        what = f"{kind} over cp is not served: {why}"
        return Problem(
            "no-attention", what, plan.source, fix="a mesh without cp: tp with sequence_parallel shards sequences too"
        )
    names = sorted({generic(name) for name in model.modules if name.rpartition(".")[2].lower().endswith(_ATTENTION)})
    what = f"the plan {plan.name} does not name the attention modules of {kind}"
    shown = names[0] if names else "layers.*.attn"
    fix = f"attention: {{{shown}: causal}}, or bidirectional, in a plan of your own"
    return Problem("no-attention", what, plan.source, fix=fix)


def _not_served(model: ModelFacts) -> str:
    """Why attention over `cp` cannot serve a model; empty if it may."""
    config = getattr(model.root, "config", None)
    for field, inputs in (("vision_config", "images"), ("audio_config", "audios")):
        if getattr(config, field, None) is not None:
            towers = [name for name in model.modules if name.rpartition(".")[2].startswith(_TOWERS[field])]
            tower = min(towers, key=len, default=f"the tower of the {inputs}")
            if any(hasattr(config, f"{inputs[:-1]}_token_{end}") for end in ("id", "index")):
                return f"its forward puts what {tower} returns in the places of {inputs} among all tokens, and a rank has some of them"
            return f"{tower} reads {inputs}, no sequences [batch, tokens]"
    if getattr(config, "is_encoder_decoder", False):
        return "its decoder attends to the tokens of the encoder, another sequence (cross-attention)"
    if getattr(model.root, "main_input_name", "input_ids") == "pixel_values":
        return "its inputs are images, no sequences [batch, tokens]"
    return ""


def _named(rule: AttentionRule, plan: Plan, model: ModelFacts) -> Iterator[str]:
    """The modules that a rule names. Raises: PlanError `unmatched-attention`."""
    for alternative in alternatives(rule.pattern):
        names = [name for name in model.modules if matches(alternative, name)]
        if not names and not rule.optional:
            what = f"`attention: {alternative}` names no module of {type(model.root).__name__}"
            raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
        yield from (name for name in names if not rule.child or f"{name}.{rule.child}" in model.modules)
