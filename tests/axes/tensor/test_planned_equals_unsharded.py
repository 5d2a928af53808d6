"""Every shipped plan, sharded as threads in one process, equals the unsharded model: the definition of correct.

Compared: inference, logits, loss, every gradient after one and after two backward passes, weights after three SGD
    steps.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.support.models import FAMILIES, tiny_batch, tiny_model
from tests.support.parity import compare, planned_run, reference_run, worst
from tests.support.threads import run_ranks

VOCAB = 67
MODES = [(False, False), (True, False), (False, True), (True, True)]
MODE_IDS = ["tensor", "sequence", "loss", "sequence+loss"]


def batches(vocab: int = VOCAB) -> list:
    return [tiny_batch(vocab, seed=1), tiny_batch(vocab, seed=2)]


@lru_cache(maxsize=64)
def prepared(family: str, dtype: torch.dtype, overrides: tuple = ()) -> tuple[Any, dict, list]:
    options = dict(overrides)
    data = batches(options.get("vocab_size", VOCAB))
    model = tiny_model(family, dtype, **options)
    return model, reference_run(model, data), data


def check(family: str, tp: int, mode: tuple[bool, bool], dtype: torch.dtype = torch.float64, **overrides: Any) -> None:
    model, expected, data = prepared(family, dtype, tuple(sorted(overrides.items())))
    models = [copy.deepcopy(model) for _ in range(tp)]
    options = {"sequence_parallel": mode[0], "loss_parallel": mode[1]}
    for actual in run_ranks(tp, lambda rank: planned_run(models[rank], tp, data, **options)):
        compare(actual, expected, dtype)


@pytest.mark.variants(every=36)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tp, mode, dtype):
    check(family, tp, mode, dtype)


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=[MODE_IDS[0], MODE_IDS[3]])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt2", "gpt_neox", "opt", "bert", "gemma2"])
def test_tied_and_untied(family, mode):
    tied = not prepared(family, torch.float64)[0].config.tie_word_embeddings
    check(family, 2, mode, tie_word_embeddings=tied)


@pytest.mark.variants(every=16)
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=[MODE_IDS[0], MODE_IDS[3]])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "olmo2"])
def test_key_value_heads(family, kv_heads, mode):
    """Multi-query, fewer heads than ranks (replicated), and as many as queries."""
    check(family, 4, mode, num_key_value_heads=kv_heads)


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_widths(family, tp):
    """Vocabulary and MLP width that no rank count divides (the sequence of 9 is odd everywhere)."""
    width = {"opt": "ffn_dim", "gpt2": "n_inner"}.get(family, "intermediate_size")
    check(family, tp, (True, True), vocab_size=65, **{width: 71})


def test_more_ranks_than_rows_leaves_empty_shards():
    check("llama", 8, (True, True), vocab_size=12, intermediate_size=17)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_eight_ranks(mode):
    check("llama", 8, mode)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_bfloat16_stays_within_its_epsilon(family):
    """Both runs round at every op; they may differ by a few epsilons of the largest value, times the depth."""
    model, expected, data = prepared(family, torch.bfloat16)
    models = [copy.deepcopy(model) for _ in range(2)]
    epsilon, roundings = 2.0**-8, 16
    for actual in run_ranks(2, lambda r: planned_run(models[r], 2, data, steps=0, sequence_parallel=True)):
        assert worst({"": actual["logits"].float()}, {"": expected["logits"].float()})[0] <= roundings * epsilon
        exact = {n: g.float() for n, g in prepared(family, torch.float32)[1]["grads"].items()}
        ours = worst({n: g.float() for n, g in actual["grads"].items()}, exact)[0]
        theirs = worst({n: g.float() for n, g in expected["grads"].items()}, exact)[0]
        assert ours <= 2 * theirs + roundings * epsilon
