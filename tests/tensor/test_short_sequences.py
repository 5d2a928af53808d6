"""Sequence parallelism with one token per rank."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, parallelize_module
from tests.support.parity import worst
from tests.support.threads import run_ranks
from tests.vocabulary.generation.generation_jobs import lively_model


@pytest.mark.parametrize("tp", [2, 4])
def test_prompts_of_one_token_per_rank(tp):
    """gpt2's Conv1D takes a view of what was gathered."""
    model = lively_model("gpt2")
    ids = torch.randint(3, 67, (3, tp), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits
    models = [copy.deepcopy(model) for _ in range(tp)]

    def body(rank):
        net = parallelize_module(models[rank], build_mesh("cpu", tp=tp), sequence_parallel=True)
        return net(input_ids=ids).logits

    for actual in run_ranks(tp, body):
        assert worst({"": actual}, {"": expected})[0] < 1e-12
