"""Which modules mix the tokens of a sequence, and how they do it over `cp`, by the plan's `attention:`.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.errors import PlanError, Problem
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.schema import AttentionRule, Plan


def attention_kinds(plan: Plan, model: ModelFacts) -> dict[str, str]:
    """Module fqn -> kind of its attention. Raises: PlanError `no-attention`, `unmatched-attention`, `two-attentions`."""
    if not plan.attention:
        what = f"the plan {plan.name} does not name the attention modules"
        raise PlanError(Problem("no-attention", what, plan.source, fix="attention: {model.layers.*.self_attn: causal}"))
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


def _named(rule: AttentionRule, plan: Plan, model: ModelFacts) -> Iterator[str]:
    """The modules that a rule names. Raises: PlanError `unmatched-attention`."""
    for alternative in alternatives(rule.pattern):
        names = [name for name in model.modules if matches(alternative, name)]
        if not names and not rule.optional:
            what = f"`attention: {alternative}` names no module of {type(model.root).__name__}"
            raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
        yield from (name for name in names if not rule.child or f"{name}.{rule.child}" in model.modules)
