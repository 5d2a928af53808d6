"""Codes and scales: their bytes, their errors, what autograd saves, and that no cast or layout changes them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import QuantizedLinear, build_mesh, dequantize, explain, full_state_dict, parallelize_module, quantize
from tests.state.quantization.quantized_models import quantized, reference_of
from tests.support.models import tiny_batch
from tests.support.threads import run_ranks

IDS, _ = tiny_batch(67)


def linear(outputs: int = 96, inputs: int = 128, bias: bool = True, dtype=torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    made = nn.Module()
    made.layers = nn.ModuleList([nn.Linear(inputs, outputs, bias=bias, dtype=dtype)])
    return made


@pytest.mark.parametrize(("form", "worst", "bytes_each"), [("nf4", 0.152, 0.53125), ("int8", 0.5 / 127, 1.03125)])
def test_errors_and_bytes(form, worst, bytes_each):
    model = linear()
    weight = model.layers[0].weight.detach().clone()
    weight[0, :64] = 0  # a block of zeros
    weight[1, 5] = -30  # a block that one element scales
    model.layers[0].weight.data = weight.clone()
    quantize(model, form)
    layer = model.layers[0]
    blocks = weight.view(96, 2, 64)
    error = (layer.weight.view(96, 2, 64) - blocks).abs()
    largest = blocks.abs().amax(-1, keepdim=True)
    assert (error <= largest * worst * 1.01 + 1e-30).all()  # half of the widest step between codes
    assert (layer.weight[0, :64] == 0).all()
    stored = sum(p.numel() * p.element_size() for p in (layer.weight_codes, layer.weight_scales))
    assert stored == bytes_each * weight.numel() and bytes_each < (0.55 if form == "nf4" else 1.05)


def test_bytes_on_ranks():
    """Of the quantized part at most 0.55 bytes per parameter over tp on each rank, in blocks of 64."""
    model = quantized("llama", "nf4", hidden_size=128, head_dim=16, num_attention_heads=8, intermediate_size=256)
    count = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear))
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        local = [p.to_local() for n, p in planned.named_parameters() if "weight_" in n]
        return sum(p.numel() * p.element_size() for p in local)

    assert run_ranks(2, body) == [count * 0.53125 / 2] * 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_autograd_saves_codes_alone(bias, autocast):
    model = linear(bias=bias)
    quantize(model)
    layer, saved = model.layers[0], []
    stock = dequantize(copy.deepcopy(model)).layers[0]
    inputs = torch.randn(5, 3, 128)
    results = []
    for each in (layer, stock):
        x = inputs.clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = each(x)
        if each is layer:
            assert [t.dtype for t in saved] == [torch.uint8] * 2  # codes and scales
        out.float().square().sum().backward()
        results.append((out, x.grad, *(p.grad for p in each.parameters() if p.grad is not None)))
    assert results[0][0].dtype == results[1][0].dtype
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=0 if not autocast else 1e-2, atol=1e-5)
    assert torch.equal(results[0][0], results[1][0])


def test_casts_leave_codes():
    model = quantized("llama", dtype=torch.float32)
    before = {n: p.clone() for n, p in model.named_parameters() if "weight_" in n}
    narrow, stock = copy.deepcopy(model).half(), reference_of(model).half()
    assert all(torch.equal(narrow.get_parameter(n), p) for n, p in before.items())
    assert narrow.model.layers[0].mlp.up_proj.weight.dtype == torch.float16
    assert torch.equal(narrow(input_ids=IDS).logits, stock(input_ids=IDS).logits)


def test_state_dict_and_weights_of_planned_models():
    model = quantized("llama")
    state, stock = model.state_dict(), reference_of(model)

    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=4))  # key/value heads on one rank each
        full = full_state_dict(planned, every_rank=True)
        assert full.keys() == state.keys() and all(torch.equal(full[n], value) for n, value in state.items())
        names = [n for n, m in planned.named_modules() if isinstance(m, QuantizedLinear)]
        return all(
            torch.equal(planned.get_submodule(n).weight.full_tensor(), stock.get_submodule(n).weight) for n in names
        )

    assert all(run_ranks(4, body))


@pytest.mark.sweep
def test_explain_counts_bytes_of_codes():
    def build():
        import transformers

        sizes = dict(vocab_size=67, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=64))

    plain = explain(build, None, "dp=2,tp=2", zero=3, sequence=16)
    codes = explain(lambda: quantize(build(), "nf4(block=16)"), None, "dp=2,tp=2", zero=3, sequence=16)
    assert codes.num_parameters == plain.num_parameters
    assert codes.ranks[0].parameters == plain.ranks[0].parameters
    elements = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # of linears in layers
    saved = plain.ranks[0].memory.parameters - codes.ranks[0].memory.parameters
    assert saved == elements / 4 * (4 - 0.625)

    def gathered(explained):
        lines = [line for line in explained.ranks[0].messages if (line.op, line.axis) == ("all_gather", "dp")]
        return sum(line.bytes * line.count for line in lines)

    assert gathered(plain) - gathered(codes) == 2 * elements / 2 * (4 - 0.625)


def test_dtypes_of_layers_of_their_own():
    layer = QuantizedLinear(64, 8, "nf4(block=16)", bias=True, dtype=torch.float64)
    layer.weight_codes.data.fill_(0x7F)  # a zero and a one
    layer.weight_scales.data.copy_(torch.full((8, 4), 2.0, dtype=torch.bfloat16).view(torch.uint8))
    layer.bias.data.zero_()
    assert torch.equal(layer(torch.ones(1, 64, dtype=torch.float64)), torch.full((1, 8), 64.0, dtype=torch.float64))
    assert "form=nf4(block=16)" in repr(layer)
    assert F.linear(torch.ones(1, 64, dtype=torch.float64), layer.weight).sum() == 512
