"""Chooses the plan for a model: by its type, by its class, or its own `base_model_tp_plan`, translated.

Torch-free.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from parallelize.base.errors import PlanError, Problem, near
from parallelize.base.providers import provider
from parallelize.plan.hf_plans import full_words, read_words, words_of
from parallelize.plan.plan_file import load_plan, read_plan, shipped_plans
from parallelize.plan.schema import Plan, Rule
from parallelize.plan.styles.notation import parse_style

log = logging.getLogger("parallelize")

_TRANSLATED = "base_model_tp_plan"


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


def shipped_plan_of(config: Any) -> Plan | None:
    """The shipped plan for a config's model type, without a model."""
    return _index()[0].get(str(getattr(config, "model_type", None)))


def choose_plan(model: Any) -> tuple[Plan, str]:
    """(the plan for this model, by what it was chosen).

    Raises: PlanError `no-plan-for-model`, `untranslatable-plan`.
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
    words = words_of(getattr(base, "config", config))
    if words:
        return translate(model, base, words), f"the model's own base_model_tp_plan ({model_type}), translated"
    raise PlanError(_no_plan(model, model_type, by_type))


def _no_plan(model: Any, model_type: Any, by_type: Mapping[str, Plan]) -> Problem:
    """The problem of a model for which there is no plan."""
    kind = f" (model type {model_type!r})" if isinstance(model_type, str) else ""
    what = f"no shipped plan is for {type(model).__name__}{kind}, and it has no plan of its own"
    fix = (
        'plan="auto" derives one; `parallelize plans derive package.module:function` writes it to a file. Or write '
        "one: a dict of names to styles, a .yaml"
    )
    close = near(model_type, by_type) if isinstance(model_type, str) else []
    rows = (("types of similar names", ", ".join(close)),) if close else ()
    return Problem("no-plan-for-model", what, rows=rows, fix=fix)


def translate(model: Any, base: Any, words: dict[str, str]) -> Plan:
    """A `transformers` plan as a `Plan`: equivalent styles, each column linear reduces its input's gradient.

    Raises: PlanError `untranslatable-plan`, with every word that has no equivalent style.
    """
    prefix = next((name + "." for name, module in model.named_modules() if module is base and name), "")
    head = getattr(model, "_tp_plan", None) or {}
    # `transformers` adds a rule for the embedding to those of a plan over tp
    embedding = hasattr(base, "embed_tokens") and bool(
        getattr(getattr(base, "config", None), "base_model_tp_plan", None)
    )
    words = full_words(words, prefix, head, embedding)
    rules = tuple(
        Rule(pattern, style, f"base_model_tp_plan {pattern}", optional=True)
        for pattern, style in read_words(words, type(model).__name__).items()
    )
    return Plan(
        name=getattr(model.config, "model_type", "translated"),
        rules=rules,
        source=_TRANSLATED,
        on_unclaimed="replicate",
    )


def plan_of(module: Any, plan: Any, tp: int = 2) -> Plan:
    """The plan for a caller's argument: a `Plan`, a name, a path, a dict of patterns to styles, None (by the model), or
    "auto", which derives one for a model without. tp: the ranks that it is derived for.

    Raises: PlanError.
    """
    if plan is None:
        return _chosen(module)
    if plan == "auto":
        return _best(module, tp)
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return load_plan(plan)
    if isinstance(plan, Mapping) and all(isinstance(style, str) for style in plan.values()):
        rules = tuple(Rule(pattern, parse_style(style, pattern), "plan dict") for pattern, style in plan.items())
        return Plan("dict", rules, source="plan dict", on_unclaimed="replicate")
    what, fix = (
        f"a plan cannot be a {type(plan).__name__}",
        "a plan's name, a path, a Plan, a style, a dict of patterns to styles, or None",
    )
    if isinstance(getattr(plan, "plan", None), Plan):
        fix = "its plan: `.plan` of what `derive_plan` returns"
    raise PlanError(Problem("bad-plan", what, fix=fix))


def _chosen(module: Any) -> Plan:
    chosen, reason = choose_plan(module)
    log.info("plan %s, chosen by %s", chosen.name, reason)
    if chosen.source == _TRANSLATED:
        log.warning("no shipped plan for %s: using %s", type(module).__name__, reason)
    return chosen


def _best(module: Any, tp: int) -> Plan:
    """What "auto" chooses: a shipped plan, that of `transformers` if it holds, or one that is derived. What stays whole
    is said."""
    auto = provider("derived_plans")
    try:
        plan = _chosen(module)
    except PlanError as error:
        if not _has_no_plan(error):
            raise
        plan = auto.derived_plan(module, tp)
    else:
        plan = auto.better_plan(module, plan, tp) if plan.source == _TRANSLATED else plan
    auto.say_share(module, plan, tp)
    return plan


def _has_no_plan(error: PlanError) -> bool:
    return error.slugs in (("no-plan-for-model",), ("untranslatable-plan",))


def plan_or_none(module: Any, plan: Any, tp: int = 2) -> Plan | None:
    """`plan_of` where a plan is optional: None for a model without a plan, or for a dict or style, which has no
    sections."""
    if plan is not None and not isinstance(plan, (Plan, str, os.PathLike)):
        return None
    try:
        return plan_of(module, plan, tp)
    except PlanError as error:
        if plan is None and _has_no_plan(error):
            return None
        raise
