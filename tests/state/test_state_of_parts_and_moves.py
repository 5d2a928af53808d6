"""State dicts of parts, wrappers and moved models are those of the stock model."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
from torch import nn

from parallelize import full_parameter
from tests.axes.tensor.planned_pairs import planned
from tests.axes.tensor.test_hot_path import pair, step
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


def test_parts_of_a_model_give_their_state_in_original_order():
    model, models = pair("gpt2")
    expected = model.transformer.state_dict()

    def body(rank):
        net = planned(models, rank)
        state = net.transformer.state_dict()
        for name, value in state.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(value, expected[name]), name
        net.transformer.load_state_dict(copy.deepcopy(dict(expected)))
        assert torch.equal(
            full_parameter(net, "transformer.h.0.attn.c_attn.weight"), expected["h.0.attn.c_attn.weight"]
        )

    run_ranks(2, body)


def test_a_wrapper_materializes_buffers_too():
    model = tiny_model("llama")
    with torch.device("meta"):
        models = [tiny_model("llama") for _ in range(2)]

    def body(rank):
        planned(models, rank)
        nn.ModuleDict({"inside": models[rank]}).to_empty(device="cpu")
        assert torch.equal(models[rank].model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)

    run_ranks(2, body)


def test_moving_a_model_frees_old_storage():
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        step(net)
        net.zero_grad()
        old = [weakref.ref(p.to_local().untyped_storage()) for p in net.parameters()]
        net.to(torch.bfloat16)
        gc.collect()
        return sum(storage() is not None for storage in old)

    assert run_ranks(2, body) == [0, 0]
