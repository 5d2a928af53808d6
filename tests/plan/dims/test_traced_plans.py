"""A plan is followed through one forward before anything runs: what needs all of a part is named with its module and
line, what does not is right. The same operations run on ranks in tests/axes/tensor/watch/test_first_forward.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import choose_plan
from parallelize.plan.dims.plan_check import PlanTrace, trace_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.miniature.rates import disable_dropout
from parallelize.plan.models.model_source import source_of
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from parallelize.plan.schema import Plan
from tests.axes.tensor.odd_models import OddModel, plan_text
from tests.axes.tensor.watch.odd_operations import BY_HEAD, BY_TOKEN, HEADS_FIRST, MIXED, OVER_TOKENS, PARTS_FIRST
from tests.support.models import FAMILIES, MIXTURES, SHIPPED, shipped_source, tiny_model

BY_HEADS = plan_text("colwise(heads)", "rowwise(heads)")
IN_PARTS = plan_text("colwise(chunks=3)", "rowwise")


def traced(model: nn.Module, plan: Plan, inputs: dict, tp: int = 2, sequence_parallel: bool = False) -> PlanTrace:
    options = Options(sequence_parallel=sequence_parallel)
    return trace_plan(model, inputs, resolve(plan, describe(model), MeshSpec([("tp", tp)]), options))


def slugs(model: nn.Module, text: str, sequence_parallel: bool) -> set[str]:
    ids = torch.randint(0, 30, (2, 8))
    return {p.slug for p in traced(model, parse_plan(text), {"ids": ids}, 2, sequence_parallel).problems}


def wrong(slug: str) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """(name, model, plan, sequence parallelism) of plans that this slug refuses."""
    if slug == "mixed-sequence":
        yield from ((name, OddModel(operation), plan_text(), True) for name, operation in OVER_TOKENS.items())
    if slug == "mixed-features":
        for mode in (False, True):
            yield from ((name, OddModel(between=operation), BY_HEADS, mode) for name, operation in MIXED.items())
    if slug == "divided":
        for operations, text in ((PARTS_FIRST, BY_HEADS), (HEADS_FIRST, IN_PARTS)):
            yield from ((name, OddModel(between=op, inner=48), text, False) for name, op in operations.items())


def right() -> Iterator[tuple[str, nn.Module, str, bool]]:
    yield from ((name, OddModel(operation), plan_text(), False) for name, operation in OVER_TOKENS.items())
    yield from ((name, OddModel(operation), plan_text(), True) for name, operation in BY_TOKEN.items())
    for mode in (False, True):
        yield from ((name, OddModel(between=operation), BY_HEADS, mode) for name, operation in BY_HEAD.items())
    for operations, text in ((PARTS_FIRST, IN_PARTS), (HEADS_FIRST, BY_HEADS)):
        yield from (
            (name, OddModel(between=operation, inner=48), text, False) for name, operation in operations.items()
        )


@pytest.mark.parametrize("slug", ["mixed-sequence", "mixed-features", "divided"])
def test_what_needs_all_of_a_part_is_refused(slug):
    missed = [
        name for name, model, text, mode in wrong(slug) if not any(slug in one for one in slugs(model, text, mode))
    ]
    assert missed == []


def test_what_does_not_is_right():
    alarms = [(name, found) for name, model, text, mode in right() if (found := slugs(model, text, mode))]
    assert alarms == []


def test_the_error_names_the_operation_the_module_and_the_line():
    def problem(model: nn.Module, text: str) -> str:
        trace = traced(model, parse_plan(text), {"ids": torch.zeros(2, 8, dtype=torch.long)}, 2, True)
        return str(trace.problems[0])

    line = OVER_TOKENS["roll"].__code__.co_firstlineno
    text = problem(OddModel(OVER_TOKENS["roll"]), plan_text())
    assert f"roll in layers.* (odd_operations.py:{line}) needs all tokens" in text
    line = MIXED["softmax"].__code__.co_firstlineno
    text = problem(OddModel(between=MIXED["softmax"]), BY_HEADS)
    assert f"inner.up.weight: softmax in layers.*.inner (odd_operations.py:{line}) needs all of what is sharded" in text


class PackedByOrder(nn.Module):
    """Query, key and value of one weight, in the order of `names`."""

    def __init__(self, names: str):
        super().__init__()
        self.names, self.qkv, self.out = names, nn.Linear(12, 40), nn.Linear(24, 12)

    def forward(self, x):
        widths = [24 if name == "q" else 8 for name in self.names]
        parts = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).split(widths, -1))
        by_name = dict(zip(self.names, parts, strict=True))
        y = F.scaled_dot_product_attention(by_name["q"], by_name["k"], by_name["v"], enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("names", "expected"), [("qkv", ""), ("kvq", "[8, 8, 24]"), ("kqv", "[8, 24, 8]")])
def test_query_key_and_value_in_another_order(names, expected):
    text = (
        "schema_version: 1\nsizes: {heads: 6, kv: 2}\ntensor_parallel: {qkv: colwise(heads + kv + kv), out: "
        "rowwise(heads)}"
    )
    problems = traced(PackedByOrder(names), parse_plan(text), {"x": torch.randn(2, 5, 12)}).problems
    assert {problem.slug for problem in problems} == ({"divided-features"} if expected else set())
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if ".split(widths, -1)" in text)
    place = f"test_traced_plans.py:{line}"
    what = (
        f"qkv.weight: the forward splits it into parts of {expected} in the model ({place}), and the plan shards "
        "chunks of [24, 8, 8]"
    )
    assert not expected or problems[0].what == what


def test_keys_and_values_before_queries():
    text = (
        "schema_version: 1\nsizes: {heads: 6, kv: 2}\ntensor_parallel: {qkv: colwise(kv + kv + heads), out: "
        "rowwise(heads)}"
    )
    for names, slugs in (("kvq", set()), ("qkv", {"divided-features"})):
        problems = traced(PackedByOrder(names), parse_plan(text), {"x": torch.randn(2, 5, 12)}).problems
        assert {problem.slug for problem in problems} == slugs


# -- shipped plans -----------------------------------------------------------------------------------------------------

QUICK = ("bloom", "codegen", "falcon", "recurrent_gemma", "deberta-v2-shared", "mixtral", "jetmoe")
NAMES = dict.fromkeys([*SHIPPED, *FAMILIES, *MIXTURES])
NAMES = [pytest.param(name, marks=() if name in QUICK else [pytest.mark.sweep]) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_shipped_plans_have_no_mistakes(name):
    """Also those of ALiBi, interleaved query, key and value, convolutions by channel, and experts."""
    torch.manual_seed(0)
    source = shipped_source(name) if name in SHIPPED else source_of(tiny_model(name))
    model = source.build("cpu")
    disable_dropout(model)
    plan, inputs = choose_plan(model)[0], inputs_of(source, model)
    for mode in (False, True) if plan.regions else (False,):
        assert traced(model, plan, inputs, 2, mode).problems == ()
    assert traced(model, plan, inputs, 4).problems == ()


def test_the_loss_of_routers_is_summed_over_the_ranks_that_have_parts_of_the_tokens():
    model = tiny_model("mixtral", output_router_logits=True)
    inputs = {**inputs_of(source_of(model), model), "labels": torch.zeros(2, 11, dtype=torch.long)}
    assert traced(model, choose_plan(model)[0], inputs, 2, True).problems == ()
