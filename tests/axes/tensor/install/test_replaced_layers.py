"""Layers that are swapped after the plan, new heads, and resized embeddings: sharded by the rule of their name, right
in every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import build_mesh, full_gradients, full_state_dict, parallelize_model, parallelize_module
from parallelize.base.errors import ModelError
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

IDS, LABELS = tiny_batch(50)
BOTH = {"sequence_parallel": True, "loss_parallel": True}


def linear(inputs: int, outputs: int, seed: int, bias: bool = False) -> nn.Linear:
    """Values by a generator of its own: ranks that are threads share torch's."""
    layer, generator = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64), torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return layer


def swap(model: nn.Module, seed: int = 0) -> None:
    """Another head of 50 classes, a column linear that has a bias now, and a row linear."""
    hidden, layers = model.config.hidden_size, model.model.layers
    model.lm_head = linear(hidden, 50, seed)
    layers[1].self_attn.q_proj = linear(hidden, layers[1].self_attn.q_proj.out_features, seed + 1, bias=True)
    layers[0].mlp.down_proj = linear(model.config.intermediate_size, hidden, seed + 2)


def values(model, of) -> dict[str, torch.Tensor]:
    logits = model(input_ids=IDS).logits
    loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    loss.backward()
    return {**of(model), "loss": loss.detach()}


def plain_gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("options", [BOTH, {"sequence_parallel": True}, {}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_swapped_layers_are_sharded_by_their_rules(tied, options):
    base = tiny_model("llama", torch.float64, tie_word_embeddings=tied)
    stock = copy.deepcopy(base)
    swap(stock)
    expected = values(stock, plain_gradients)

    def body(rank):
        planned = parallelize_module(copy.deepcopy(base), build_mesh("cpu", tp=2), **options)
        planned(input_ids=IDS[:, :3])
        swap(planned, seed=7 * rank)  # the first rank's values count
        optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
        actual, state = values(planned, full_gradients), full_state_dict(planned, every_rank=True)
        assert all(torch.equal(state[name], value) for name, value in stock.state_dict().items())
        assert not [p for group in optimizer.param_groups for p in group["params"] if p.grad is None]
        return actual

    assert max(worst(actual, expected)[0] for actual in run_ranks(2, body)) < 1e-12


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings(tied):
    base = tiny_model("llama", torch.float64, tie_word_embeddings=tied)
    size = base.config.vocab_size + 5
    stock = copy.deepcopy(base)
    stock.resize_token_embeddings(size)

    def body(rank):
        planned = parallelize_module(copy.deepcopy(base), build_mesh("cpu", tp=2), **BOTH)
        torch.manual_seed(rank)
        planned.resize_token_embeddings(size)
        assert planned(input_ids=IDS).logits.shape[-1] == size
        return full_state_dict(planned, every_rank=True), values(planned, full_gradients)

    for state, actual in run_ranks(2, body):
        before = base.model.embed_tokens.weight
        assert torch.equal(state["model.embed_tokens.weight"][: len(before)], before)
        stock.load_state_dict(state)
        stock.zero_grad()
        assert worst(actual, values(stock, plain_gradients))[0] < 1e-12


def test_what_the_plan_cannot_say_is_refused():
    base = tiny_model("llama", torch.float64)

    def body(rank):
        planned = parallelize_module(copy.deepcopy(base), build_mesh("cpu", tp=2))
        planned.model.layers[0].mlp.up_proj = nn.Embedding(3, 5)
        for _ in range(2):  # what was refused is not run the second time either
            with refused(ModelError, "added-parameter", "up_proj", "the plan does not fit"):
                planned(input_ids=IDS)

    run_ranks(2, body)

    def over_data_axes(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2, tp=2), zero=3)
        swap(parallel.module)
        with refused(ModelError, "added-parameter", "ZeRO 3"):
            parallel.module(input_ids=IDS)

    run_ranks(4, over_data_axes)
