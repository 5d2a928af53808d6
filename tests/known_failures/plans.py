"""Mistakes in plans: what `lint` or `verify` says of a shipped plan with one rule changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallelize import load_plan
from parallelize.plan.styles.notation import parse_style
from tests.known_failures.failure import found
from tests.support.mutants import Mutant


def changed(name: str, pattern: str, style: str) -> Mutant:
    """A shipped plan in which the rule with this pattern has another style."""
    plan = load_plan(name)
    (rule,) = [rule for rule in plan.rules if rule.pattern == pattern]
    rules = tuple(replace(rule, style=parse_style(style)) if each is rule else each for each in plan.rules)
    return Mutant(f"{pattern}: {style}", replace(plan, rules=rules), (pattern,), rule.where)


@found(
    "NVIDIA-NeMo/Automodel#1324",
    "2026-02",
    "q, k and v in one weight are cut as if they were one, so that a rank has all of q and half of k",
    "the plan of Phi 3 with its packed linear as one block of columns",
    by="lint",
    slug="units-do-not-meet",
)
def packed_projections() -> tuple[Mutant, Any, str]:
    return changed("phi3", "model.layers.*.self_attn.qkv_proj", "colwise"), "phi3", "tp=2"


@found(
    "NVIDIA/Megatron-LM#7452",
    "2026-09",
    "a norm on the heads of a rank has its gradient summed only with sequence parallelism: replicas of it part",
    "the plan of Qwen 3 with the norms of queries and keys as if every rank had all of their gradient",
    by="lint",
    slug="gradient-not-reduced",
)
def norms_of_heads() -> tuple[Mutant, Any, str]:
    return changed("qwen3", "model.layers.*.self_attn.{q,k}_norm", "replicate(gradient=full)"), "qwen3", "tp=2"


@found(
    "NVIDIA-NeMo/Automodel#3822",
    "2026-09",
    "weights that every rank of tensor parallelism has get the gradient of the rank's own tokens, and drift; a reload "
    "then changes the model",
    "a plan that takes the gradients of norms in a sequence-parallel region for full ones",
    by="lint",
    slug="replicated-in-region",
)
def norms_that_drift() -> tuple[Mutant, Any, str]:
    return changed("llama", "model.layers.*.input_layernorm", "replicate(gradient=full)"), "llama", "tp=2"
