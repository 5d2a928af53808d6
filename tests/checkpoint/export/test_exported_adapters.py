"""Exports of models with adapters: weights with LoRA in them, and the adapters alone, against PEFT on one process."""

from __future__ import annotations

import copy
import json
import math

import peft
import pytest
import torch
from torch.distributed.tensor import DTensor

from parallelize import build_mesh, export_weights, parallelize_model
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.export.engines import verl_per_tensor_param
from parallelize.checkpoint.export.export_weights import WeightExporter
from tests.support.models import tiny_model
from tests.support.refused import refused
from tests.support.threads import run_ranks

LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS = {
    "lora": ("llama", peft.LoraConfig(**LORA)),
    "rank-stabilized": ("llama", peft.LoraConfig(**LORA, use_rslora=True)),
    "table and head": (
        "llama",
        peft.LoraConfig(r=4, target_modules=["embed_tokens", "o_proj"], modules_to_save=["lm_head"]),
    ),
    "transposed": ("gpt2", peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "dora": ("llama", peft.LoraConfig(**LORA, use_dora=True)),
    "ia3": ("llama", peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
}
MERGED = [kind for kind in KINDS if kind not in ("dora", "ia3")]
MESHES = [
    ({"tp": 2}, {}),
    ({"pp": 2}, {"num_microbatches": 2}),
    ({"dp": 2}, {"zero": 3}),
    ({"dp": 2, "tp": 2}, {"zero": 1}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"pp": 2, "dp": 2}, {"zero": 2, "num_microbatches": 2}),
]


def adapted(kind, dtype=torch.float64):
    """A model with adapters of values that are not zero, in PEFT's wrapper."""
    family, config = KINDS[kind]
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model(family, torch.float64, tie_word_embeddings=False), copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model.to(dtype)


def exported(model, **options):
    buckets = export_weights(model, bucket="20KB", **options)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}


def local_values(module):
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]


def on_ranks(axes, options, model, body):
    copies = [copy.deepcopy(model) for _ in range(math.prod(axes.values()))]
    return run_ranks(
        len(copies), lambda rank: body(parallelize_model(copies[rank], build_mesh("cpu", **axes), **options), rank)
    )


@pytest.mark.parametrize("kind", MERGED)
@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
def test_weights_with_their_lora_are_those_of_peft(kind, axes, options):
    model = adapted(kind)
    expected = copy.deepcopy(model).merge_and_unload().state_dict()

    def body(parallel, rank):
        before = local_values(parallel.module)
        weights = exported(parallel, merge_adapters=True, receive=rank == 0)
        again = exported(parallel, merge_adapters=True, receive=rank == 0)
        assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
        assert all(map(torch.equal, before, local_values(parallel.module)))
        return weights

    weights, *others = on_ranks(axes, options, model, body)
    assert weights.keys() == expected.keys() and not any(others)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axes", "options"), MESHES[:5], ids=str)
def test_adapters_alone_are_what_peft_saves(kind, axes, options):
    model = adapted(kind)
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    for adapters in on_ranks(axes, options, model, lambda parallel, rank: exported(parallel, names="peft")):
        assert adapters.keys() == expected.keys()
        assert all(torch.equal(adapters[name], value) for name, value in expected.items())


def test_engines_get_the_config_beside_the_adapters():
    def body(parallel, rank):
        tensors, config = verl_per_tensor_param(WeightExporter(parallel, names="peft"))
        assert verl_per_tensor_param(WeightExporter(parallel, merge_adapters=True))[1] is None
        return dict(tensors).keys(), json.loads(json.dumps(config))

    model = adapted("lora")
    for names, config in on_ranks({"tp": 2}, {}, model, body):
        assert names == peft.get_peft_model_state_dict(model).keys()
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6, "LORA")
        assert config["target_modules"] == sorted(LORA["target_modules"])


def test_sums_of_16_bit_weights_are_rounded_once():
    model = adapted("lora", torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    update = layer.lora_B.default.weight.float() @ layer.lora_A.default.weight.float() * layer.scaling["default"]
    expected = (layer.base_layer.weight.float() + update).bfloat16()
    for weights in on_ranks({"tp": 2}, {}, model, lambda parallel, rank: exported(parallel, merge_adapters=True)):
        assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], expected)


def test_what_has_changed_since_the_last_export():
    def body(parallel, rank):
        exporter = WeightExporter(parallel, merge_adapters=True)

        def changed():
            return {name for bucket in exporter.export(changed=True) for name in bucket.tensors}

        assert len(changed()) > 10 and not changed()
        adapters = dict(parallel.module.named_parameters())
        with torch.no_grad():
            next(value for name, value in adapters.items() if "layers.1.self_attn.v_proj.lora_B" in name).mul_(2)
        return changed()

    assert on_ranks({"tp": 2}, {}, adapted("lora"), body) == [{"model.layers.1.self_attn.v_proj.weight"}] * 2


@pytest.mark.parametrize(
    ("kind", "text"), [("dora", "a variant of LoRA (DoraLinearVariant)"), ("ia3", "adapters of a Linear")]
)
def test_adapters_that_are_no_sum_are_refused(kind, text):
    def body(parallel, rank):
        with refused(CheckpointError, "unmerged-adapters", text, "names='peft'"):
            exported(parallel, merge_adapters=True)
        with refused(CheckpointError, "unmerged-adapters", "merge_adapters=True"):
            exported(parallel)

    on_ranks({"tp": 2}, {}, adapted(kind), body)


def test_a_tied_weight_of_another_stage_is_refused_too():
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"])
    tied = peft.get_peft_model(tiny_model("llama", torch.float64, tie_word_embeddings=True), config)

    def body(parallel, rank):
        with refused(CheckpointError, "unmerged-adapters", "a weight that is tied"):
            exported(parallel, merge_adapters=True)

    on_ranks({"pp": 2}, {}, tied, body)


@pytest.mark.parametrize(("axes", "options"), [*MESHES[:2], MESHES[4]], ids=str)
def test_adapters_that_came_after_the_plan(axes, options):
    base = tiny_model("llama", torch.float64, tie_word_embeddings=False)
    expected = copy.deepcopy(base).state_dict()

    def body(parallel, rank):
        torch.manual_seed(0)
        peft.get_peft_model(parallel.module, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        return exported(parallel, merge_adapters=True)  # before a forward: they add nothing yet

    for weights in on_ranks(axes, options, base, body):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_tied_weight_and_a_model_without_adapters_are_refused():
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens"])
    tied = peft.get_peft_model(tiny_model("llama", torch.float64, tie_word_embeddings=True), config)
    with refused(CheckpointError, "unmerged-adapters", "a weight that is tied"):
        exported(tied, merge_adapters=True)
    with refused(CheckpointError, "no-adapters", "names='hf'"):
        exported(tiny_model("llama"), names="peft")
