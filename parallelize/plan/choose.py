"""Which plan serves a model: by its type, its class, or the `base_model_tp_plan` that it carries, translated.

Floor 2: torch-free.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from parallelize.errors import PlanError, Problem, did_you_mean
from parallelize.plan.exchange import read_words, whole_words
from parallelize.plan.load import load_plan, read_plan, shipped_plans
from parallelize.plan.schema import Plan, Rule
from parallelize.styles.text import parse_style

log = logging.getLogger("parallelize")


@lru_cache(maxsize=1)
def _index() -> tuple[dict[str, Plan], dict[str, Plan]]:
    """Shipped plans by model type and by class name."""
    by_type: dict[str, Plan] = {}
    by_class: dict[str, Plan] = {}
    for path in shipped_plans().values():
        plan = read_plan(path)
        by_type |= dict.fromkeys(plan.model_types, plan)
        by_class |= dict.fromkeys(plan.classes, plan)
    return by_type, by_class


def choose_plan(model: Any) -> tuple[Plan, str]:
    """(the plan for this model, how it was found).

    Raises: PlanError `no-plan-for-model`, or that the model's own plan cannot be translated.
    """
    by_type, by_class = _index()
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type in by_type:
        return by_type[model_type], f"model type {model_type}"
    for cls in type(model).__mro__:
        if cls.__name__ in by_class:
            return by_class[cls.__name__], f"class {cls.__name__}"
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    own = getattr(getattr(base, "config", config), "base_model_tp_plan", None)
    if own:
        return translate(model, base, own), f"the model's own base_model_tp_plan ({model_type}), translated"
    raise PlanError(
        Problem(
            "no-plan-for-model",
            f"no shipped plan serves {type(model).__name__} (model type {model_type!r}), and it carries none",
            fix=did_you_mean(str(model_type), by_type) + " Or write one: pass a path to a .yaml file",
        )
    )


def translate(model: Any, base: Any, own: dict[str, str]) -> Plan:
    """A `transformers` plan as ours: the same words, each column linear reducing its own input gradient.

    Raises: PlanError `untranslatable-plan` naming every word that has no equal here.
    """
    prefix = next((name + "." for name, module in model.named_modules() if module is base and name), "")
    head = getattr(model, "_tp_plan", None) or {}
    whole = whole_words(own, prefix, head, embedding=hasattr(base, "embed_tokens"))
    rules = tuple(
        Rule(pattern, style, f"base_model_tp_plan {pattern}", optional=True)
        for pattern, style in read_words(whole, type(model).__name__).items()
    )
    return Plan(
        name=getattr(model.config, "model_type", "translated"),
        rules=rules,
        source="base_model_tp_plan",
        unclaimed="replicate",
    )


def plan_of(module: Any, given: Any) -> Plan:
    """The plan that a caller means: a `Plan`, a name, a path, a dict of style words, or None to choose by the model.

    Raises: PlanError.
    """
    if given is None:
        plan, why = choose_plan(module)
        log.info("plan %s, chosen by %s", plan.name, why)
        if plan.source == "base_model_tp_plan":
            log.warning("no shipped plan for %s: using %s", type(module).__name__, why)
        return plan
    if isinstance(given, Plan):
        return given
    if isinstance(given, (str, os.PathLike)):
        return load_plan(given)
    if isinstance(given, Mapping) and all(isinstance(style, str) for style in given.values()):
        rules = tuple(Rule(pattern, parse_style(style, pattern), "plan dict") for pattern, style in given.items())
        return Plan("dict", rules, source="plan dict", unclaimed="replicate")
    raise PlanError(
        Problem(
            "bad-plan",
            f"a plan cannot be a {type(given).__name__}",
            fix="a plan's name, a path, a Plan, a style, a dict of patterns to styles, or None",
        )
    )


def plan_or_none(module: Any, given: Any) -> Plan | None:
    """The same, where a plan is of use but not needed: None for a model that no plan serves, or for another form of plan."""
    if given is not None and not isinstance(given, (Plan, str, os.PathLike)):
        return None
    try:
        return plan_of(module, given)
    except PlanError as error:
        if given is None and error.slugs in (("no-plan-for-model",), ("untranslatable-plan",)):
            return None
        raise
