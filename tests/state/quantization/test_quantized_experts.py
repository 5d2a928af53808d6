"""Stacked experts in 4 and 8 bits: values and gradients of the dequantized model, bytes on a rank, what autograd saves,
codes that are read."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, full_gradients, load_pretrained, parallelize_module, quantize
from parallelize.base.errors import ModelError
from parallelize.state.quantization.quantized_experts import QuantizedExperts, stacked_weights
from tests.axes.tensor.install.adapted_models import EXPERTS
from tests.state.quantization.quantized_models import SIZES, reference_of, with_lora
from tests.support.models import MIXTURES, tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

IDS, LABELS = tiny_batch(67)
LORA = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}


def mixture(family: str = "mixtral", dtype: torch.dtype = torch.float64, **sizes) -> torch.nn.Module:
    return tiny_model(family, dtype, **{**(SIZES.get(family) or WIDE), **sizes})


def values(model, of) -> dict[str, torch.Tensor]:
    logits = model(input_ids=IDS).logits
    F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
    return {**of(model), "logits": logits.detach()}


def plain_gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


MESHES = [(4, {"ep": 2, "etp": 2}), (2, {}), (4, {"sequence_parallel": True}), (2, {"ep": 2})]


@pytest.mark.variants(every=8)
@pytest.mark.parametrize(("tp", "options"), MESHES, ids=str)
@pytest.mark.parametrize("lora_first", [False, True])
@pytest.mark.parametrize(("family", "form"), [("mixtral", "nf4(block=16)"), ("gpt_oss", "int8(block=16)")])
def test_lora_on_quantized_experts(family, form, lora_first, tp, options):
    model = mixture(family)
    model = quantize(with_lora(model, **LORA), form) if lora_first else with_lora(quantize(model, form), **LORA)
    assert sum(isinstance(m, QuantizedExperts) for m in model.modules()) == 2
    models, expected = [copy.deepcopy(model) for _ in range(tp)], values(reference_of(model), plain_gradients)
    assert sum("experts" in name for name in expected) == 8  # A and B of two weights in two layers
    assert worst(values(copy.deepcopy(model), plain_gradients), expected)[0] < 1e-12

    def body(rank):
        return values(parallelize_module(models[rank], build_mesh("cpu", tp=tp), **options), full_gradients)

    assert max(worst(actual, expected)[0] for actual in run_ranks(tp, body)) < 1e-12


def test_bytes_on_a_rank_and_what_is_dense():
    """With blocks of 64: at most 0.55 bytes for each weight over tp; autograd saves codes, and no more than one expert
    is dense."""
    model = quantize(mixture(hidden_size=128, head_dim=16, intermediate_size=128, num_local_experts=4), "nf4")
    count = 2 * 4 * 3 * 128 * 128  # of four experts in each of two layers
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        local = [
            p.to_local() for name, p in planned.named_parameters() if "proj_codes" in name or "proj_scales" in name
        ]
        return sum(p.numel() * p.element_size() for p in local)

    for stored in run_ranks(2, body):
        assert stored == count * 0.53125 / 2 <= 0.55 * count / 2
    experts = next(m for m in model.modules() if isinstance(m, QuantizedExperts))
    saved, one = [], 2 * 128 * 128 * 8
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    tokens = torch.randn(6, 128, dtype=torch.float64, requires_grad=True)
    choices = torch.arange(12).view(6, 2) % 4
    with hooks:
        out = experts(tokens, choices, torch.ones(6, 2, dtype=torch.float64))
    assert max(t.untyped_storage().nbytes() for t in saved if t.dtype != torch.uint8) < one / 8
    out.sum().backward()


FORMS = [name for name in MIXTURES if name not in ("llama4_text", "dbrx", "jetmoe", "phimoe", "nemotron_h")]


@pytest.mark.sweep
@pytest.mark.parametrize("family", FORMS)
def test_experts_of_every_family_over_ep(family):
    """Whole experts on each rank, quantized alone."""
    model = tiny_model(family, torch.float64)
    names = [name for name, module in model.named_modules() if stacked_weights(module)]
    quantize(model, "nf4(block=8)", modules=names)
    models, expected = [copy.deepcopy(model) for _ in range(2)], values(reference_of(model), plain_gradients)

    def body(rank):
        return values(parallelize_module(models[rank], build_mesh("cpu", tp=2), ep=2), full_gradients)

    for actual in run_ranks(2, body):
        assert worst({name: actual[name] for name in expected}, expected)[0] < 1e-12


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("tp", [2, 1, 4])
def test_codes_are_read_by_block(tp, tmp_path):
    model = mixture(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = quantize(type(model)(model.config), "nf4(block=16)")
    full = quantize(model, "nf4(block=16)").state_dict()
    models = [copy.deepcopy(empty) for _ in range(tp)]

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=tp))
        load_pretrained(planned, tmp_path)
        named = ((n, p) for n, p in planned.named_parameters() if "_codes" in n or "_scales" in n)
        return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in named}

    for codes in run_ranks(tp, body):
        assert sum("experts" in name for name in codes) == 8
        assert all(torch.equal(value, full[name]) for name, value in codes.items())


def test_experts_are_not_merged_into_and_not_split_inside_of_a_block():
    model = with_lora(quantize(mixture(), "nf4(block=16)"), **LORA)
    with refused(ModelError, "quantized-weight"):
        model.merge_adapter()
    with refused(ModelError, "partial-block", "experts.down_proj"):
        quantize(mixture(intermediate_size=24), "nf4(block=16)")
