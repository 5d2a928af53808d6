"""A copy of a planned model draws the masks of the original."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, install_dropout, parallelize_module
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_a_deep_copy_draws_the_same_masks(sequence_parallel):
    stock = tiny_model("gpt2", torch.float64, resid_pdrop=0.2, attn_pdrop=0.3, embd_pdrop=0.1)
    ids, labels = tiny_batch(length=8)

    def body(rank: int) -> list[float]:
        mesh = build_mesh("cpu", tp=2)
        original = parallelize_module(copy.deepcopy(stock), mesh, sequence_parallel=sequence_parallel)
        copied = copy.deepcopy(original)
        losses = []
        for model in (original, copied):
            install_dropout(model, seed=7)
            losses.append(loss_of(model(input_ids=ids).logits, labels).item())
        return losses

    results = run_ranks(2, body)
    assert all(original == copied for original, copied in results) and results[0] == results[1]
