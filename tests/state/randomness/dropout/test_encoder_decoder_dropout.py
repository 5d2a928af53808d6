"""Dropout of an encoder and a decoder, whose sequence-parallel regions have shards of different lengths, also where
layers are recomputed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import build_mesh, full_gradients, parallelize_module
from parallelize.axes.recomputation.recompute import recompute
from parallelize.state.randomness.dropout.install import install_dropout
from tests.support.models import shipped_source
from tests.support.parity import TOLERANCE, worst
from tests.support.threads import run_ranks

SEED = 7
IDS, DECODER_IDS = torch.randint(3, 60, (2, 11)), torch.randint(3, 60, (2, 8))


def model_with_dropout() -> nn.Module:
    source = shipped_source("bart")
    source.config.dropout, source.config.attention_dropout = 0.2, 0.3
    torch.manual_seed(3)
    return source.build("cpu").double().train()


def step(model: nn.Module) -> torch.Tensor:
    logits = model(input_ids=IDS, decoder_input_ids=DECODER_IDS, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), DECODER_IDS.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("recomputed", [False, True])
def test_an_encoder_and_a_decoder_draw_the_masks_of_one_process(recomputed):
    model = model_with_dropout()
    alone, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    install_dropout(alone, SEED)
    expected = step(alone)
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}

    def body(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True)
        if recomputed:
            recompute(models[rank], "full")
        install_dropout(models[rank], SEED)
        return step(models[rank]), full_gradients(models[rank])

    for loss, actual in run_ranks(2, body):
        assert worst({"loss": loss}, {"loss": expected})[0] <= TOLERANCE[torch.float64]
        error, name = worst(actual, gradients)
        assert error <= TOLERANCE[torch.float64], name
