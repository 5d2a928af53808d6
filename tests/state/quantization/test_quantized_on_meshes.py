"""LoRA on a quantized base on every axis: losses and clipped norms of 20 AdamW steps are those with the dequantized
weights."""

from __future__ import annotations

import copy
from math import prod

import pytest

from tests.axes.tensor.install.adapted_models import EXPERTS
from tests.state.quantization import quantized_jobs
from tests.state.quantization.quantized_jobs import steps_of
from tests.state.quantization.quantized_models import quantized, reference_of, with_lora
from tests.support.threads import run_ranks
from tests.training.test_adapters_on_meshes import unsharded

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
    "dp2-tp2-ep4-mixtral": ({"dp": 2, "tp": 2}, {"zero": 2, "ep": 4, **SP}),
}


@pytest.mark.sweep
@pytest.mark.variants(every=8)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case):
    axes, options = CASES[case]
    drops = case.endswith("dropout")
    form = "int8(block=16)" if case.endswith("int8") else "nf4(block=16)"
    lora = {"lora_dropout": 0.2} if drops else {}
    if is_mixture := case.endswith("mixtral"):
        lora = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
    model = with_lora(quantized("mixtral" if is_mixture else "llama", form), **lora)
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    results = run_ranks(len(models), lambda rank: steps_of(models[rank], axes, options))
    expected, _ = unsharded(reference_of(model), drops)
    assert all((actual - expected).abs().max() < 1e-11 for actual in results)


@pytest.mark.processes
def test_two_processes(two_processes):
    assert max(two_processes.run(quantized_jobs.error_of_logits)) < 1e-12


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("zero", [1, 3])
def test_four_processes(four_processes, zero):
    errors = four_processes.run(quantized_jobs.error_of_steps, {"dp": 2, "tp": 2}, {"zero": zero, **SP})
    assert max(errors) < 1e-11


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("adapted", [False, True])
def test_a_layer_compiles_whole(two_processes, adapted):
    assert max(two_processes.run(quantized_jobs.error_of_a_compiled_layer, adapted, timeout_s=240)) < 1e-12
