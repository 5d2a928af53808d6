"""Every shipped plan at real sizes: the default config of each type that it names, and published models.

A plan resolves, or refuses for a reason whose numbers are those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from parallelize import MeshSpec, ModelError, PlanError
from parallelize.base.errors import Problem
from parallelize.plan.choose import shipped_plan_of
from parallelize.plan.model_facts import ModelFacts, describe
from parallelize.plan.models.model_source import read_model
from parallelize.plan.options import Options
from parallelize.plan.plan_file import read_plan, shipped_plans
from parallelize.plan.resolve import resolve
from tests.tp_plans.published_sizes import PUBLISHED

SIZES = (2, 4, 8)
BY_DESIGN = {"gemma4_text": "replicated-in-region"}
"""Types whose plan says in its comment that sequence parallelism is refused."""

NOT_BUILT = ("dots1", "hunyuan_v1_moe", "lfm2_moe", "nemotron")
"""Types of whose default config the stock class of transformers cannot build a model."""

TYPES = sorted({model_type for path in shipped_plans().values() for model_type in read_plan(path).model_types})


def problems_of(model_type: str, sizes: dict[str, Any]) -> Iterator[tuple[str, Any, Problem]]:
    """(mesh, config, problem) of every mode with tp, or with ep, of 2, 4 and 8."""
    source = read_model(model_type, sizes)
    facts, plan = describe(source.build("meta")), shipped_plan_of(source.config)
    assert plan is not None
    for size in SIZES:
        for options in _modes(facts, bool(plan.regions), size):
            try:
                resolve(plan, facts, MeshSpec(tp=size), options)
            except PlanError as error:
                for problem in error.problems:
                    yield f"tp={size}, {options.ep}", source.config, problem


def _modes(facts: ModelFacts, region: bool, size: int) -> Iterator[Options]:
    yield Options(sequence_parallel=region)
    if any(module.kind in ("experts", "expert block") for module in facts.modules.values()):
        yield Options(sequence_parallel=region, ep=size)


def _is_true(model_type: str, config: Any, problem: Problem) -> bool:
    """Whether a problem says that a count of the model is not divisible by tp, or what the plan's comment says."""
    if problem.slug == BY_DESIGN.get(model_type):
        return True
    text = " ".join(value for _, value in problem.rows)
    counted = re.search(r"(\d+) .*over axis tp \(size (\d+)\)", text)
    if problem.slug != "uneven-heads" or counted is None:
        return False
    count, size = map(int, counted.groups())
    chunks = int(found[1]) if (found := re.search(r"in (\d+) chunks", text)) else 1
    return count in set(_numbers(config.to_dict())) and count % (chunks * size) != 0


def _numbers(value: Any) -> Iterator[int]:
    """All integers of a config."""
    if isinstance(value, int):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _numbers(item)


def check(model_type: str, sizes: dict[str, Any], refuses: bool | None = None) -> None:
    """refuses: whether a mesh is refused at all; None: it may be."""
    problems = list(problems_of(model_type, sizes))
    untrue = [f"{mesh}: {problem}" for mesh, config, problem in problems if not _is_true(model_type, config, problem)]
    assert not untrue, "\n".join(untrue)
    assert refuses is None or bool(problems) == refuses


@pytest.mark.parametrize(("name", "refuses"), [("gpt-oss-20b", False), ("falcon-7b", True)])
def test_a_published_model_resolves_or_is_refused_for_its_own_numbers(name, refuses):
    """64 heads of width 64; 71 heads, which no size divides."""
    check(*PUBLISHED[name], refuses)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_resolves_or_is_refused_for_its_own_numbers(name):
    check(*PUBLISHED[name])


@pytest.mark.sweep
@pytest.mark.processes  # transformers looks for ninja where it builds an rwkv
@pytest.mark.parametrize("model_type", TYPES)
def test_every_default_config_resolves_or_is_refused_for_its_own_numbers(model_type):
    if model_type in NOT_BUILT:
        with pytest.raises(ModelError, match="unbuildable-model"):
            read_model(model_type).build("meta")
        return
    check(model_type, {})


def test_every_family_that_is_named_most_has_published_sizes():
    assert len(PUBLISHED) >= 40 and {model_type for model_type, _ in PUBLISHED.values()} <= set(TYPES)
