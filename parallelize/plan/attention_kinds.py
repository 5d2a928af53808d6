"""Which modules attend to all tokens of a sequence, by the plan's `attention:`.

Torch-free.
"""

from __future__ import annotations

from parallelize.errors import PlanError, Problem
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.schema import Plan


def attention_kinds(plan: Plan, model: ModelFacts) -> dict[str, str]:
    """Module fqn -> kind of its attention. Raises: PlanError `no-attention`, `unmatched-attention`."""
    if not plan.attention:
        what = f"the plan {plan.name} does not name the attention modules"
        raise PlanError(Problem("no-attention", what, plan.source, fix="attention: {model.layers.*.self_attn: causal}"))
    kinds: dict[str, str] = {}
    for pattern, kind in plan.attention:
        for alternative in alternatives(pattern):
            names = [name for name in model.modules if matches(alternative, name)]
            if not names:
                what = f"`attention: {alternative}` names no module of {type(model.root).__name__}"
                raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
            kinds |= dict.fromkeys(names, kind)
    return kinds
