"""Linears that bitsandbytes and torchao have quantized keep their weights, and are split as others are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import QuantizedLinear, build_mesh, full_gradients, import_quantized, parallelize_module
from parallelize.base.errors import ModelError
from tests.state.quantization.foreign_layouts import Float8Tensor, of_4_bits, of_8_bits, of_integers
from tests.state.quantization.quantized_models import with_lora
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

KINDS: dict[str, Any] = {
    "nf4": of_4_bits,
    "nf4-nested": lambda linear: of_4_bits(linear, nested=True),
    "nf4-blocks-of-a-row": lambda linear: of_4_bits(linear, block=128),
    "fp4": lambda linear: of_4_bits(linear, "fp4"),
    "8-bits": of_8_bits,
    "8-bits-after-a-forward": lambda linear: of_8_bits(linear, after_forward=True),
    "int4-groups": of_integers,
    "int8-row": lambda linear: of_integers(linear, group=128, bits=8, zeros=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_other_library(kind):
    torch.manual_seed(0)
    linear, weight = KINDS[kind](nn.Linear(128, 24))
    hook = linear.register_forward_hook(lambda *_: None)
    model = import_quantized(nn.Sequential(linear))
    assert model[0] is linear and type(linear) is QuantizedLinear and hook.id in linear._forward_hooks
    assert worst({"weight": linear.weight}, {"weight": weight})[0] < 1e-6
    stored = sum(p.numel() for name, p in linear.named_parameters() if name != "bias") / weight.numel()
    # int8 of groups of 32: bfloat16 scales are exact
    assert stored <= (0.5625 if "4" in kind and "int" not in kind else 1.07)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_block_changes_no_value(kind):
    torch.manual_seed(0)
    linear, weight = KINDS[kind](nn.Linear(128, 24))
    model = import_quantized(nn.Sequential(linear), block=16)
    assert model[0].form.block == 16 and worst({"weight": model[0].weight}, {"weight": weight})[0] < 1e-6


def imported(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """(a model whose layers three layouts quantize, imported; the model with the weights that they stand for)."""
    torch.manual_seed(0)
    model = tiny_model("llama", dtype, hidden_size=64, head_dim=8, intermediate_size=128)
    reference = copy.deepcopy(model)
    makers = {"self_attn": lambda x: of_4_bits(x, nested=True, block=16), "gate": of_integers}
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, nn.Linear):
            make = next((make for key, make in makers.items() if key in name), of_8_bits)
            parent: Any = model.model.get_submodule(name.rpartition(".")[0])
            made, weight = make(linear)
            setattr(parent, name.rpartition(".")[2], made)
            reference.model.get_submodule(name).weight.data.copy_(weight)
    model.is_quantized, model.config.quantization_config = True, {"load_in_4bit": True}
    model = import_quantized(model)
    for linear in model.modules():
        if isinstance(linear, QuantizedLinear):
            linear.dtype = dtype
    return model, reference


@pytest.mark.sweep
def test_plans_split_them():
    pytest.importorskip("peft")
    model, reference = imported(torch.float64)
    assert not hasattr(model, "is_quantized") and not hasattr(model.config, "quantization_config")
    model, reference = with_lora(model), with_lora(reference)
    models, (ids, labels) = [copy.deepcopy(model) for _ in range(2)], tiny_batch(67)

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True)
        loss = loss_of(planned(input_ids=ids).logits, labels)
        loss.backward()
        return {"loss": loss.detach(), **full_gradients(planned)}

    loss = loss_of(reference(input_ids=ids).logits, labels)
    loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None and p.requires_grad}
    for actual in run_ranks(2, body):
        expected = {"loss": loss.detach(), **{n: g for n, g in gradients.items() if n in actual}}
        assert len(expected) == 29 and worst({n: actual[n] for n in expected}, expected)[0] < 1e-6


def test_what_cannot_be_converted_is_named_and_nothing_is_changed():
    good, _ = of_4_bits(nn.Linear(128, 24))
    uneven, _ = of_4_bits(nn.Linear(96, 24), block=64)
    early, _ = of_4_bits(nn.Linear(128, 24))
    del early.weight.quant_state
    fp16, _ = of_8_bits(nn.Linear(128, 24))
    fp16.weight.SCB = None
    dynamic, _ = of_integers(nn.Linear(128, 24))
    dynamic.weight.activation_quantization = "int8_asym_per_token"
    points, _ = of_integers(nn.Linear(128, 24))
    points.weight.zero_point = points.weight.zero_point.float()
    wide, _ = of_integers(nn.Linear(128, 24), bits=8)
    small, _ = of_integers(nn.Linear(128, 24), group=4)
    other = nn.Linear(128, 24)
    other._parameters["weight"] = Float8Tensor(torch.empty(24, 128), requires_grad=False)
    moved, _ = of_4_bits(nn.Linear(128, 24))
    moved.forward = moved.forward
    bad = {"do not divide rows of 96": uneven, "not quantized yet": early, "fp16 weights": fp16}
    bad |= {"quantizes activations": dynamic, "no integers": points, "more than 8 bits": wide, "of 4 elements": small}
    bad |= {"a Float8Tensor": other, "a forward of its own": moved}
    for text, linear in bad.items():
        model = nn.Sequential(good, linear)
        with refused(ModelError, "other-quantizer", text):
            import_quantized(model)
        assert type(good) is not QuantizedLinear and type(linear) is not QuantizedLinear
    with refused(ModelError, "unknown-format"):
        import_quantized(nn.Sequential(good), block=12)
    with refused(ModelError, "no-such-linear"):
        import_quantized(nn.Sequential(nn.Linear(8, 8)))


def test_after_a_plan_it_is_too_late():
    model = tiny_model("llama")

    def body(rank):
        with refused(ModelError, "wrong-order"):
            import_quantized(parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2)))

    run_ranks(2, body)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("word", ["nf4", "fp4"])
def test_the_weights_of_bitsandbytes_itself(word, nested):
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit(256, 96, quant_type=word, compress_statistics=nested)
    model = nn.Sequential(linear).to("cpu")
    expected = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    assert torch.equal(import_quantized(model)[0].weight, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weights_of_torchao_itself(dtype):
    quantization = pytest.importorskip("torchao.quantization")
    group = quantization.PerGroup(32)
    configs = [
        quantization.Int8WeightOnlyConfig(),
        quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
    ]
    for config in configs:
        model = nn.Sequential(nn.Linear(256, 96)).to(dtype)
        quantization.quantize_(model, config)
        expected = model[0].weight.dequantize()
        assert torch.equal(import_quantized(model)[0].weight, expected)
