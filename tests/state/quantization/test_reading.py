"""Weights are quantized while they are read: each rank reads its own blocks, and codes do not depend on the mesh."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, build_optimizer, load_pretrained, parallelize_module, quantize, shard_data
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.hub import quantized_tensors
from tests.state.quantization.quantized_models import SIZES, reference_of
from tests.support.models import keep_float64, tiny_batch, tiny_model
from tests.support.threads import run_ranks

IDS, LABELS = tiny_batch(67)


def saved(family: str, folder, dtype=torch.float32, **sizes):
    """(a model on meta with quantized linears, the folder of its weights, the model with values, quantized)."""
    model = tiny_model(family, dtype, **{**SIZES[family], **sizes})
    model.save_pretrained(folder)
    with torch.device("meta"):
        empty = type(model)(model.config).to(dtype).train()
    if dtype == torch.float64:
        keep_float64(empty)
    return quantize(empty, "nf4(block=16)"), quantize(model, "nf4(block=16)")


def codes_of(model) -> dict[str, torch.Tensor]:
    """Full codes and scales by name. A collective."""
    named = ((n, p) for n, p in model.named_parameters() if "weight_" in n)
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in named}


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_codes_are_those_of_the_full_weight(family, tp, tmp_path):
    empty, expected = saved(family, tmp_path)
    models = [copy.deepcopy(empty) for _ in range(tp)]

    def body(rank):
        model = parallelize_module(models[rank], build_mesh("cpu", tp=tp))
        loaded = load_pretrained(model, tmp_path)
        return codes_of(model), loaded, model(input_ids=IDS).logits.detach()

    full, logits = codes_of(expected), expected(input_ids=IDS).logits.detach()
    for codes, _, out in run_ranks(tp, body):
        assert codes.keys() == full.keys() and len(full) > 8
        assert all(torch.equal(codes[name], full[name]) for name in full)
        assert (out - logits).abs().max() < 1e-5


def test_values_in_place_are_replaced(tmp_path):
    _, expected = saved("llama", tmp_path)
    model = quantize(tiny_model("llama", seed=1, **SIZES["llama"]), "nf4(block=16)")
    assert not torch.equal(
        codes_of(model)["model.layers.0.mlp.up_proj.weight_codes"],
        codes_of(expected)["model.layers.0.mlp.up_proj.weight_codes"],
    )
    load_pretrained(model, tmp_path)
    assert all(torch.equal(codes, codes_of(expected)[name]) for name, codes in codes_of(model).items())
    bad = tmp_path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(bad)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].int()
    save_file(tensors, bad, {"format": "pt"})
    with pytest.raises(CheckpointError, match="to be quantized is floating-point") as raised:
        load_pretrained(model, tmp_path)
    assert raised.value.slugs == ("wrong-dtype",)


def test_the_full_weight_is_never_in_memory(tmp_path, monkeypatch):
    """Of one linear of 8 MB, parts of 64 KiB are read."""
    sizes = {"intermediate_size": 32768, "num_hidden_layers": 1}
    empty, _ = saved("llama", tmp_path, **sizes)
    monkeypatch.setattr(quantized_tensors, "PART_BYTES", 1 << 16)
    largest = []
    stock = torch.empty

    def measured(*shape, **options):
        made = stock(*shape, **options)
        largest.append(0 if made.device.type == "meta" else made.nbytes)
        return made

    models = [copy.deepcopy(empty) for _ in range(2)]

    def body(rank):
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        return load_pretrained(model, tmp_path).bytes_read

    monkeypatch.setattr(quantized_tensors.torch, "empty", measured)
    read = run_ranks(2, body)
    assert largest and max(largest) <= 1 << 20  # codes of a shard of a linear: 32768 / 2 x 64 / 2 bytes
    total = (tmp_path / "model.safetensors").stat().st_size
    assert max(read) < 0.55 * total


def with_adapters(model):
    """LoRA that has an effect, the same on every rank, on a frozen base."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
        if "lora" in name:
            values = torch.linspace(-0.2, 0.3, parameter.numel(), dtype=parameter.dtype)
            parameter.data.copy_(values.view_as(parameter))
    return model


def losses_of(model, optimizer, rows: slice) -> torch.Tensor:
    """Losses of steps on these rows, over the count of all tokens."""
    losses = []
    for _ in range(5):
        logits = model(input_ids=IDS[rows], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), LABELS[rows].flatten(), reduction="sum") / (LABELS != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_each_rank_reads_its_blocks_then_adapters_then_zero(tmp_path):
    empty, full = saved("llama", tmp_path, torch.float64)
    models = [copy.deepcopy(empty) for _ in range(4)]

    def body(rank):
        mesh = build_mesh("cpu", dp=2, tp=2)
        model = parallelize_module(models[rank], mesh)
        load_pretrained(model, tmp_path)
        with_adapters(model)
        with torch.no_grad():
            model(input_ids=IDS)  # plans the adapters
        shard_data(model, mesh, zero=2)
        row = mesh.get_local_rank("dp")
        return losses_of(model, build_optimizer(model, torch.optim.AdamW, lr=0.01), slice(row, row + 1))

    stock = with_adapters(reference_of(full))
    expected = losses_of(
        stock, torch.optim.AdamW([p for p in stock.parameters() if p.requires_grad], lr=0.01), slice(2)
    )
    results = run_ranks(4, body)
    assert (results[0] + results[2] - expected).abs().max() < 1e-11 and expected[0] - expected[-1] > 1e-3


@pytest.mark.parametrize("on_meta", [True, False])
def test_adapters_may_be_there_before_the_weights(on_meta, tmp_path):
    peft = pytest.importorskip("peft")
    empty, full = saved("mixtral", tmp_path)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "modules_to_save": ["lm_head"]}
    config = peft.LoraConfig(r=2, **targets)
    model = empty if on_meta else quantize(tiny_model("mixtral", seed=1, **SIZES["mixtral"]), "nf4(block=16)")
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    load_pretrained(adapted, tmp_path)
    assert not any(parameter.is_meta for parameter in adapted.parameters())
    assert (adapted(input_ids=IDS).logits - full(input_ids=IDS).logits).abs().max() < 1e-6  # B is zero
    lora = {name: p for name, p in adapted.named_parameters() if "lora_A" in name}
    assert len(lora) == 4 and all(p.abs().max() > 1e-3 and p.isfinite().all() for p in lora.values())
    copied = adapted.get_parameter("base_model.model.lm_head.modules_to_save.default.weight")
    assert torch.equal(copied, full.lm_head.weight)
