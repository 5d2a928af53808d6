"""Mistakes made mechanically in every shipped plan: `lint` or `verify` catches each one that changes a number, and
names it.

A mutant that neither catches is compared once more by the tests' own parity run, which has no code in common with
`verify`. `make test` judges every sixteenth mutant of two plans, `make sweep` all mutants of all plans.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest

from parallelize import load_plan
from parallelize.base.errors import ParallelizeError
from parallelize.tools.analysis.automatic_trace import VARIABLE
from tests.support.models import FAMILIES

MODEL_TYPES = {"gemma3": "gemma3_text"}
SIZES = {"num_hidden_layers": 2}
OF_FAMILY = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}  # by default every sixth is full
FEWER_KV_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
WIDE = {"llama": FEWER_KV_HEADS, "qwen3": FEWER_KV_HEADS}  # run on tp=4 too
NAMED = 0.8
HEADS = ("score", "classifier", "multiple_choice_head.summary")  # of classes that this sweep does not build


SLOW = ("deepseek_v3", "gpt_oss", "mixtral")  # of which Mixtral's, with the rules of all, is sampled
PLANS = [*((family, "tp=2") for family in FAMILIES if family not in SLOW), *((family, "tp=4") for family in WIDE)]
SAMPLED = (("llama", "tp=2"), ("gpt2", "tp=2"))
SAMPLE_EVERY = 16


def judged(family: str, mesh: str, every: int = 1) -> list[tuple[str, str, bool, str]]:
    """(mutant, what caught it, whether its rule or module was named, the message) of every n-th mutant of a plan."""
    from tests.support.mutants import judge, mutants

    judgments = []
    tp = int(mesh.removeprefix("tp="))
    sizes = {**SIZES, **OF_FAMILY.get(family, {}), **(WIDE[family] if tp == 4 else {})}
    served = [m for m in mutants(load_plan(family)) if not any(pattern.startswith(HEADS) for pattern in m.patterns)]
    for mutant in served[::every]:
        judgment = judge(mutant, MODEL_TYPES.get(family, family), [mesh], sizes)
        by = judgment.by
        if by == "nobody" and not same_numbers(family, mutant.plan, tp):
            by = "missed"
        judgments.append((mutant.name, by, judgment.named or judgment.near, judgment.message))
    return judgments


def same_numbers(family: str, plan: Any, tp: int) -> bool:
    """Whether a planned run equals the unsharded one, by the tests' own comparison, or is refused for its sizes.

    Plans are traced, as those of users are and those of most tests are not.
    """
    import torch

    from tests.support.models import tiny_batch, tiny_model
    from tests.support.parity import compare, planned_run, reference_run
    from tests.support.threads import run_ranks

    batches = [tiny_batch(seed=1), tiny_batch(seed=2)]
    modes = {"sequence_parallel": bool(plan.regions)}
    sizes = {**OF_FAMILY.get(family, {}), **(WIDE[family] if tp == 4 else {})}
    reference = reference_run(tiny_model(family, torch.float64, **sizes), batches)
    # built here, because threads share the generator that initializes them
    models = [tiny_model(family, torch.float64, **sizes) for _ in range(tp)]
    try:
        with patch.dict(os.environ, {VARIABLE: "on"}):
            results = run_ranks(tp, lambda rank: planned_run(models[rank], tp, batches, plan=plan, **modes))
    except ParallelizeError:
        return True
    try:
        for result in results:
            compare(result, reference, torch.float64)
    except AssertionError:
        return False
    return True


def check(judgments: list[tuple[str, str, bool, str]], caught_at_least: int) -> None:
    missed = [name for name, by, _, _ in judgments if by == "missed"]
    assert not missed, missed
    caught = [(name, named) for name, by, named, _ in judgments if by in ("lint", "verify")]
    assert len(caught) >= caught_at_least
    unnamed = [name for name, named in caught if not named]
    assert len(unnamed) <= (1 - NAMED) * len(caught), unnamed
    if os.environ.get("SHOW_MUTANTS"):
        counts = {who: sum(by == who for _, by, _, _ in judgments) for who in ("lint", "verify", "nobody")}
        print(counts, f"named {1 - len(unnamed) / len(caught):.0%}", unnamed)


@pytest.mark.full
@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "mesh"), PLANS)
def test_every_mistake_that_changes_a_number_is_caught_and_named(family, mesh):
    check(judged(family, mesh), caught_at_least=31)


@pytest.mark.full
@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_sample_of_mistakes_in_a_mixture_is_caught_and_named():
    check(judged("mixtral", "tp=2", 4), caught_at_least=12)


OTHERS = {"t5": 4, "bart": 12, "whisper": 12, "vit": 1, "clip": 5, "convnext": 1, "swin": 4}
OTHERS |= {"mamba": 4, "mamba2": 3, "modernbert": 3, "distilbert": 4, "bloom": 4, "falcon": 8, "gemma3n": 6}
"""Plans of other kinds of models, with of how many mistakes one is judged: encoders and decoders, images, state-space
mixers, biases by heads, gathered linears."""


def judged_as_it_is(family: str, every: int) -> list[tuple[str, str, bool, str]]:
    """As `judged`, of a tiny model as it is. Of what nobody caught, `verify` alone says that the numbers are the
    same."""
    import torch

    from parallelize.plan.choose import shipped_plan_of
    from parallelize.plan.models.example_inputs import inputs_of
    from parallelize.tools.derivation.proof import provable
    from tests.support.models import shipped_source
    from tests.support.mutants import judge, mutants

    torch.manual_seed(0)
    source = shipped_source(family)
    model, plan = source.build("cpu"), shipped_plan_of(source.config)
    source = provable(source, model, inputs_of(source, model))
    names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]
    served = [mutant for mutant in mutants(plan) if any(_matches(mutant, name) for name in names)]
    judgments = []
    for mutant in served[::every]:
        judgment = judge(mutant, source, ["tp=2"], full_size=True)
        judgments.append((mutant.name, judgment.by, judgment.named or judgment.near, judgment.message))
    return judgments


def _matches(mutant: Any, name: str) -> bool:
    from parallelize.plan.pattern import alternatives, matches

    return any(matches(one, name) for pattern in mutant.patterns for one in alternatives(pattern))


@pytest.mark.full
@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "every"), OTHERS.items())
def test_mistakes_in_plans_of_other_kinds_are_caught_and_named(family, every):
    check(judged_as_it_is(family, every), caught_at_least=5)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize(("family", "mesh"), SAMPLED)
def test_a_sample_of_mistakes_is_caught_and_named(family, mesh):
    check(judged(family, mesh, SAMPLE_EVERY), caught_at_least=2)
