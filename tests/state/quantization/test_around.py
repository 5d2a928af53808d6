"""Checkpoints, adapters after the plan, DoRA, `verify` and export of models with quantized linears."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import (
    Checkpointer,
    build_mesh,
    export_weights,
    parallelize_model,
    parallelize_module,
    save_adapter,
    verify,
)
from tests.state.quantization.quantized_models import quantized, reference_of, with_lora
from tests.support.models import tiny_batch
from tests.support.threads import run_ranks

pytest.importorskip("peft")

IDS, LABELS = tiny_batch(67)


@pytest.mark.sweep
def test_checkpoints_load_on_another_mesh(tmp_path):
    model = with_lora(quantized("llama"))
    models = [copy.deepcopy(model) for _ in range(4)]

    def save(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", tp=2))
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01)
        parallel.step(input_ids=IDS, targets=LABELS, use_cache=False)
        optimizer.step()
        with Checkpointer(tmp_path, parallel, optimizer=optimizer) as checkpoints:
            checkpoints.save(1)
        return parallel.module(input_ids=IDS).logits.detach()

    saved = run_ranks(2, save)[0]
    models = [copy.deepcopy(model) for _ in range(4)]

    def load(rank):
        for parameter in models[rank].parameters():
            if not parameter.is_floating_point():
                parameter.data.zero_()
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2, tp=2), zero=3)
        with Checkpointer(tmp_path, parallel, optimizer=parallel.optimizer(torch.optim.AdamW, lr=0.01)) as checkpoints:
            checkpoints.resume()
        return (parallel.module(input_ids=IDS).logits - saved).abs().max()

    assert max(run_ranks(4, load)) < 1e-12


def test_adapters_after_the_plan(tmp_path):
    import peft

    model = quantized("llama")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)

    def body(rank):
        adapted = peft.get_peft_model(parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2)), config)
        logits = adapted(input_ids=IDS).logits.detach()
        save_adapter(adapted, tmp_path / "lora")
        return logits

    reached = run_ranks(2, body)
    expected = peft.PeftModel.from_pretrained(reference_of(model), tmp_path / "lora")(input_ids=IDS).logits
    assert max((logits - expected).abs().max() for logits in reached) < 1e-12


def test_dora_reads_the_weight():
    model = with_lora(quantized("llama"), use_dora=True)
    expected = reference_of(model)(input_ids=IDS).logits

    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), sequence_parallel=True)
        return (planned(input_ids=IDS).logits - expected).abs().max()

    assert max(run_ranks(2, body)) < 1e-12


def test_codes_are_exported_under_the_model_s_names():
    model = quantized("llama")

    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2))
        values = {}
        for bucket in export_weights(planned, names="model"):
            values |= {name: value.clone() for name, value in bucket.tensors.items()}
        return values

    state = model.state_dict()
    for values in run_ranks(2, body):
        assert values.keys() == state.keys() and all(torch.equal(values[n], value) for n, value in state.items())


@pytest.mark.sweep
def test_verify():
    result = verify(lambda: quantized("llama", dtype=torch.float32), None, "dp=2,tp=2", zero=3)
    assert result.ok, str(result)
