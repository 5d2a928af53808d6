"""Mistakes made mechanically in every shipped plan: `lint` or `verify` catches each one that changes a number, and names it.

What neither catches is compared once more by the tests' own parity run, which shares nothing with `verify`.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from parallelize import load_plan
from parallelize.errors import ParallelizeError
from tests.support.models import FAMILIES

MODEL_TYPES = {"gemma3": "gemma3_text"}
SIZES = {"num_hidden_layers": 2}
OF_FAMILY = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}  # by default every sixth is full
FEWER_KV_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
WIDE = {"llama": FEWER_KV_HEADS, "qwen3": FEWER_KV_HEADS}  # tried on tp=4 too
NAMED = 0.8
HEADS = ("score", "classifier", "multiple_choice_head.summary")  # of classes that the model of this sweep does not have


def judged(family: str, mesh: str = "tp=2") -> list[tuple[str, str, bool, str]]:
    """(mutant, by whom it was caught, whether it was named, what was told) of every mutant of a plan."""
    import torch

    from tests.support.mutants import judge, mutants

    torch.set_num_threads(1)
    found = []
    tp = int(mesh.removeprefix("tp="))
    sizes = {**SIZES, **OF_FAMILY.get(family, {}), **(WIDE[family] if tp == 4 else {})}
    for mutant in mutants(load_plan(family)):
        if any(pattern.startswith(HEADS) for pattern in mutant.patterns):
            continue
        told = judge(mutant, MODEL_TYPES.get(family, family), [mesh], sizes)
        by = told.by
        if by == "nobody" and not same_numbers(family, mutant.plan, tp):
            by = "missed"
        found.append((mutant.name, by, told.named or told.near, told.told))
    return found


def same_numbers(family: str, plan: Any, tp: int) -> bool:
    """Whether a planned run equals the unsharded one, by the tests' own comparison, or is refused aloud for its sizes."""
    import torch

    from tests.support.models import tiny_batch, tiny_model
    from tests.support.parity import compare, planned_run, reference_run
    from tests.support.threads import run_ranks

    batches = [tiny_batch(seed=1), tiny_batch(seed=2)]
    modes = {"sequence_parallel": plan.region is not None}
    sizes = {**OF_FAMILY.get(family, {}), **(WIDE[family] if tp == 4 else {})}
    wanted = reference_run(tiny_model(family, torch.float64, **sizes), batches)
    models = [
        tiny_model(family, torch.float64, **sizes) for _ in range(tp)
    ]  # threads share the generator that draws them
    try:
        got = run_ranks(tp, lambda rank: planned_run(models[rank], tp, batches, plan=plan, **modes))
    except ParallelizeError:
        return True
    try:
        for one in got:
            compare(one, wanted, torch.float64)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def judgements():
    """All families, two at a time. Where the threaded group of an old torch is not reliable, there is nothing to see."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        started = {pair: pool.submit(judged, *pair) for pair in sorted(SWEEP, reverse=True)}
        yield {pair: future.result(timeout=900) for pair, future in started.items()}


SWEEP = [*((family, "tp=2") for family in FAMILIES), *((family, "tp=4") for family in WIDE)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "mesh"), SWEEP)
def test_every_mistake_that_changes_a_number_is_caught_and_named(judgements, family, mesh):
    found = judgements[family, mesh]
    missed = [name for name, by, _, _ in found if by == "missed"]
    assert not missed, missed
    caught = [(name, named, told) for name, by, named, told in found if by in ("lint", "verify")]
    assert len(caught) > 30
    unnamed = [name for name, named, _ in caught if not named]
    assert len(unnamed) <= (1 - NAMED) * len(caught), unnamed
    if os.environ.get("SHOW_MUTANTS"):
        by = {who: sum(one[1] == who for one in found) for who in ("lint", "verify", "nobody")}
        print(family, by, f"named {1 - len(unnamed) / len(caught):.0%}", unnamed)
