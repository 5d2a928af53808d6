"""LoRA on a quantized base on every axis: losses and clipped norms of 20 AdamW steps are those with the dequantized weights."""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from tests.quantization.quantized_models import quantized, reference_of, with_lora
from tests.support.threads import run_ranks
from tests.training.test_adapters_on_meshes import IDS, LABELS, STEPS, unsharded

pytest.importorskip("peft")

SP = {"sequence_parallel": True}
CASES = {
    "dp2-tp2": ({"dp": 2, "tp": 2}, {**SP, "loss_parallel": True}),
    "dp2-tp2-zero3-recompute": ({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full", **SP}),
    "dp2-tp2-zero2": ({"dp": 2, "tp": 2}, {"zero": 2}),
    "dp2-tp2-zero1": ({"dp": 2, "tp": 2}, {"zero": 1}),
    "dp2-zero3-int8": ({"dp": 2}, {"zero": 3}),
    "pp2-tp2-recompute": ({"pp": 2, "tp": 2}, {**SP, "recompute": "selective"}),
    "tp2-dropout": ({"tp": 2}, SP),
}


@pytest.mark.variants(every=7)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case):
    axes, options = CASES[case]
    drops = case.endswith("dropout")
    form = "int8(block=16)" if case.endswith("int8") else "nf4(block=16)"
    model = with_lora(quantized("llama", form), lora_dropout=0.2 if drops else 0.0)
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(models[rank], mesh, dropout_seed=3, **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        assert len(stepped) == sum(p.requires_grad for p in parallel.module.parameters())  # no state of codes
        rows = len(IDS) // axes.get("dp", 1)
        first = rows * (mesh.get_local_rank("dp") if "dp" in axes else 0)
        values = []
        for _ in range(STEPS):
            part = slice(first, first + rows)
            loss = parallel.step(input_ids=IDS[part], targets=LABELS[part], use_cache=False)
            values += [loss.detach().double(), torch.as_tensor(parallel.clip_grad_norm_(0.5)).double()]
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(values)

    expected, _ = unsharded(reference_of(model), drops)
    assert all((actual - expected).abs().max() < 1e-11 for actual in run_ranks(len(models), body))
