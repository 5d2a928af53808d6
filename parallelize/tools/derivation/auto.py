"""What `plan="auto"` gives a model that has no plan, or one of `transformers` that does not hold: one that is derived
from it, and proven, on each rank alike."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.base.errors import ParallelizeError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.plan.schema import Plan
from parallelize.state.randomness.init.initialize import initialize, recipe_of
from parallelize.tools.derivation.derive import derive_plan
from parallelize.tools.derivation.gathered_linears import ENOUGH
from parallelize.tools.derivation.proof import provable, prove
from parallelize.tools.derivation.small_model import check_elements, small_model

log = logging.getLogger("parallelize")


_MOST_RANKS = 8  # of a proof, whose ranks are threads


def derived_plan(model: nn.Module, tp: int) -> Plan:
    """The plan. Each rank derives it, from the same random numbers; the first rank logs what was proven.

    tp: the ranks that it is for. A model of one's own, which is not scaled, is proven on as many: what they do not
    divide is left whole.

    Raises: as `derive_plan`.
    """
    source = source_of_instance(model)
    ranks = 2 if isinstance(source, ModelSource) else min(max(tp, 2), _MOST_RANKS)
    derived = derive_plan(_with_values(source), tp=ranks)
    if _is_first():
        log.info("plan %s, derived from %s: %s", derived.plan.name, type(model).__name__, derived.proof)
    return derived.plan


def _with_values(source: nn.Module | ModelSource) -> nn.Module | ModelSource:
    """A copy on the CPU, with initial values, of a module on the meta device; anything else itself.

    Raises: ModelError `too-large-to-run`, and those of `initialize`.
    """
    if isinstance(source, ModelSource) or not any(parameter.is_meta for parameter in source.parameters()):
        return source
    check_elements(source)
    return initialize(copy.deepcopy(source), 0, device="cpu", recipe=recipe_of(source))


def better_plan(model: nn.Module, translated: Plan, tp: int) -> Plan:
    """The plan of `transformers`, or the derived one: where the first is not proven on a small model, or leaves more of
    it whole.

    tp: as in `derived_plan`. Where no plan can be derived, the model keeps its own, which is refused where it is
    applied if it does not fit.
    """
    source = source_of_instance(model)
    if not isinstance(source, ModelSource):
        return translated
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            source, small = small_model(source, 2)
            subject = provable(source, small, inputs_of(source, small))
            is_proven = _fits(model, translated, tp) and prove(subject, translated, 2).ok
            share = _share(small, translated, 2) if is_proven else 0.0
            if share >= ENOUGH:
                return translated
            derived = derive_plan(source, tp=2)
        except ParallelizeError as error:
            log.debug("no plan is derived for %s: %s", type(model).__name__, error)
            return translated
    if derived.share <= share:
        return translated
    if _is_first():
        why = f"shards {share:.0%} of a small model" if is_proven else "is not proven"
        log.info("plan %s, derived from %s: its own plan %s", derived.plan.name, type(model).__name__, why)
    return derived.plan


def _fits(model: nn.Module, plan: Plan, tp: int) -> bool:
    try:
        _share(model, plan, tp)
    except ParallelizeError:
        return False
    return True


def say_share(model: nn.Module, plan: Plan, tp: int) -> None:
    """Warn, once, of a plan that leaves most of a model whole on each rank of `tp`."""
    with suppress(ParallelizeError):  # a plan that does not fit is refused where it is applied
        share = _share(model, plan, tp)
        if share < ENOUGH and _is_first():
            text = "plan %s leaves %.0f%% of the parameters of %s whole on each of %d ranks: `explain` lists them"
            log.warning(text, plan.name, 100 * (1 - share), type(model).__name__, tp)


def _share(model: nn.Module, plan: Plan, tp: int) -> float:
    """Of the elements of parameters, those that the plan shards. Raises: as `resolve`."""
    rows = resolve(plan, describe(model), MeshSpec([("tp", tp)]), Options()).parameters.values()
    elements = [(prod(row.fact.shape), row.layout.dim is not None) for row in rows]
    return sum(size for size, is_sharded in elements if is_sharded) / max(1, sum(size for size, _ in elements))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def source_of_instance(model: nn.Module) -> Any:
    """A model of `transformers` as its class and config, to build a small one from; any other as it is."""
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return ModelSource(type(model).__name__, lambda config: type(model)(config), config)
    return model
