"""What quantized linears cannot do is refused by name, before anything is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial

from parallelize import (
    ColwiseParallel,
    QuantizedLinear,
    RowwiseParallel,
    build_mesh,
    dequantize,
    export_weights,
    initialize,
    parallelize_module,
    quantize,
    save_pretrained,
)
from parallelize.base.errors import ParallelizeError
from tests.state.quantization.quantized_models import quantized, with_lora
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

IDS, _ = tiny_batch(67)


def refused(slug: str, call, *arguments, **options) -> str:
    with pytest.raises(ParallelizeError) as raised:
        call(*arguments, **options)
    assert set(raised.value.slugs) == {slug}, str(raised.value)
    return str(raised.value)


def linears(**sizes) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(sizes.get("inputs", 64), 64)])
    return model


@pytest.mark.parametrize("text", ["fp4", "nf4(block=48)", "int8(4)", "", None])
def test_formats(text):
    assert "nf4(block=32)" in refused("unknown-format", quantize, linears(), text)


def test_linears_that_cannot_be_quantized():
    refused("no-such-linear", quantize, nn.Sequential(nn.ReLU()))
    assert "did you mean" in refused("no-such-linear", quantize, linears(), modules="layers.0.up")
    uneven = linears(inputs=72)
    assert "72 % 64 = 8" in refused("partial-block", quantize, uneven) and type(uneven.layers[0]) is nn.Linear
    assert "nf4(block=8)" in refused("partial-block", quantize, uneven)
    refused("unquantizable-linear", quantize, nn.Sequential(nn.ReLU()), modules="0")
    own = linears()
    own.layers[0].forward = own.layers[0].forward
    assert "forward of its own" in refused("unquantizable-linear", quantize, own)
    refused("unquantizable-linear", quantize, quantize(linears()))  # a second time
    tied = tiny_model("gemma2")
    refused("tied-weight", quantize, tied, "nf4(block=16)", modules="lm_head")
    assert "72 % 64 = 8" in refused("partial-block", QuantizedLinear, 72, 8, "int8")
    broken = linears()
    broken.layers[0].weight.data[3, 4] = torch.inf
    refused("not-finite-weight", quantize, broken)
    assert type(broken.layers[0]) is nn.Linear


def test_stacked_experts_stay_and_are_named():
    model = tiny_model("llama4_text")  # whose forward multiplies by all experts at once
    text = r"leaves stacked experts as they are: \d+ parameters in model.layers.\*.feed"
    with pytest.warns(UserWarning, match=text) as warned:
        quantize(model, "nf4(block=8)")
    assert [w.filename for w in warned] == [__file__]  # the caller's line
    assert model.model.layers[0].feed_forward.experts.down_proj.is_floating_point()


def test_blocks_that_tp_does_not_divide():
    model = quantized("llama", "nf4(block=64)", intermediate_size=192)
    for text in run_ranks(
        2, lambda rank: refused("split-block", parallelize_module, copy.deepcopy(model), build_mesh("cpu", tp=2))
    ):
        assert "element 96: 96 % 64 = 32" in text and "192 input features over axis tp (size 2)" in text


def test_orders_and_writes():
    model = quantized("llama")
    refused("quantized-weights", initialize, copy.deepcopy(model), 0)

    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2))
        refused("wrong-order", quantize, planned)
        refused("wrong-order", dequantize, planned)
        refused("quantized-base", save_pretrained, planned, "/nowhere/at-all")
        refused("quantized-base", export_weights, planned)
        layer = planned.model.layers[0].mlp.up_proj
        refused("quantized-weight", layer.weight.mul_, 2)
        return True

    assert all(run_ranks(2, body))
    refused(
        "quantized-weight",
        setattr,
        model.lm_head.__class__ and model.model.layers[0].mlp.up_proj,
        "weight",
        nn.Parameter(torch.ones(1)),
    )
    refused("quantized-weight", nn.init.normal_, model.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_names_the_way(safe):
    pytest.importorskip("peft")
    model = with_lora(quantized("llama"))
    assert "dequantize(model)" in refused("quantized-weight", model.merge_and_unload, safe_merge=safe)
    expected = model(input_ids=IDS).logits
    merged = dequantize(model).merge_and_unload(safe_merge=safe)
    assert (merged(input_ids=IDS).logits - expected).abs().max() < 1e-12
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_merging_on_ranks():
    pytest.importorskip("peft")
    model = with_lora(quantized("llama"))

    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2))
        before = planned(input_ids=IDS).logits
        refused("quantized-weight", planned.merge_adapter)
        return (planned(input_ids=IDS).logits - before).abs().max()

    assert max(run_ranks(2, body)) == 0


class Params4bit(nn.Parameter):
    """A stand-in: bitsandbytes is recognized by the names of its classes."""


def test_other_quantizers():
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer._parameters["weight"] = Params4bit(torch.zeros(1728, 1), requires_grad=False)
    assert "Params4bit" in refused("other-quantizer", quantize, model)
    texts = run_ranks(
        2, lambda rank: refused("other-quantizer", parallelize_module, copy.deepcopy(model), build_mesh("cpu", tp=2))
    )
    assert all("model.layers.*.mlp.up_proj" in text for text in texts)
    loaded = tiny_model("llama")
    loaded.is_quantized, loaded.quantization_method = True, "torchao"
    assert "torchao" in refused("other-quantizer", quantize, loaded)


def test_style_objects_that_split_codes_by_themselves():
    styles = {f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("up_proj", "gate_proj")}
    styles["model.layers.*.mlp.down_proj"] = RowwiseParallel(output_layouts=Partial())  # no rule says this
    model = quantized("llama")

    def body(rank):
        return refused("quantized-style", parallelize_module, copy.deepcopy(model), build_mesh("cpu", tp=2), styles)

    assert all("mlp" in text for text in run_ranks(2, body))
