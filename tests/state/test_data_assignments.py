"""`parameter.data = values` changes what a planned model computes with, as for plain parameters."""

from __future__ import annotations

import copy

import torch

from parallelize import build_mesh, full_parameter, parallelize_module
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


def test_values_are_written_to_the_shard():
    model = tiny_model("llama", torch.float64)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        ids = torch.arange(6)[None]
        with torch.no_grad():
            before = planned(input_ids=ids).logits
            for name in ("q_proj", "o_proj", "k_proj"):
                weight = planned.get_submodule(f"model.layers.0.self_attn.{name}").weight
                weight.data = weight.data * 2
        return before, planned(input_ids=ids).logits, full_parameter(planned, "model.layers.0.self_attn.q_proj.weight")

    for before, after, weight in run_ranks(2, body):
        assert torch.equal(weight, 2 * model.model.layers[0].self_attn.q_proj.weight)
        assert not torch.allclose(before, after)
