"""Whole experts of Llama 4, which its block calls with every token for each expert: only the rows of chosen experts are
sent."""

from __future__ import annotations

import pytest
import torch

from parallelize import ModelError, build_mesh, parallelize_module
from parallelize.axes.tensor.experts import expert_parallel
from tests.axes.tensor.experts.test_expert_tensor_parallel import gradients
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


@pytest.mark.parametrize("k", [1, 2])
def test_rows_of_chosen_experts_alone_are_sent(monkeypatch, k):
    rows, stock = [], expert_parallel.routes_of

    def counting(choices, *args):
        rows.append(len(choices))
        return stock(choices, *args)

    monkeypatch.setattr(expert_parallel, "routes_of", counting)
    model, (ids, labels) = tiny_model("llama4_text", torch.float64, num_experts_per_tok=k), tiny_batch(length=8)
    expected, results = gradients(model, ids, labels, ep=2, sequence_parallel=True)
    for actual in results:
        assert worst(actual, expected)[0] <= 1e-12
    assert len(rows) == 4 and sum(rows) == 2 * k * ids.numel()  # of two ranks and two layers with experts


def test_an_activation_that_is_not_zero_at_zero_is_refused():
    """Rows of zeros would have a gradient."""
    models = [tiny_model("llama4_text", hidden_act="sigmoid") for _ in range(2)]
    with pytest.raises(ModelError, match=r"wrong-experts-call: .*act_fn\(0\) = 0[\s\S]*ep=1"):
        run_ranks(2, lambda rank: parallelize_module(models[rank], build_mesh("cpu", tp=2), ep=2))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"ep": 2}, {"ep": 2, "sequence_parallel": True}, {"etp": 2}], ids=str)
@pytest.mark.parametrize("length", [1, 3])
def test_a_rank_without_rows(length, options):
    """Of one token, or of equal ones, which all choose one expert: the other rank receives nothing, and its gradients
    are zeros."""
    model, ids = tiny_model("llama4_text", torch.float64), torch.full((1, length), 5)
    expected, results = gradients(model, ids, ids + 2, **options)
    for actual in results:
        assert worst(actual, expected)[0] <= 1e-12
