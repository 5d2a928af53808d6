"""Models of libraries that may be installed: each gets a proven plan, with the styles that its code allows."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
import torch

from parallelize import derive_plan

pytestmark = pytest.mark.sweep
IMAGE = (torch.zeros(2, 3, 16, 16),)
IDS = (torch.zeros(2, 11, dtype=torch.long),)


def library(name):
    try:
        return import_module(name)
    except Exception as error:  # a library that another version of torch was built for raises anything
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}")


def drawn(inputs):
    """Random values of these shapes and dtypes; other values as they are."""
    generator = torch.Generator().manual_seed(3)

    def draw(value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator)
        return torch.randint(1, 9, value.shape, generator=generator)

    return {k: draw(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(draw, inputs))


def rules_of(make, inputs):
    derived = derive_plan(make, drawn(inputs))
    assert derived.proof.ok
    return {rule.pattern: str(rule.style) for rule in derived.plan.rules}, derived


def test_timm_vision_transformer():
    module = library("timm.models.vision_transformer")
    sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=10)
    rules, derived = rules_of(module.VisionTransformer(**sizes), IMAGE)
    assert rules["blocks.*.attn.qkv"] == "colwise(heads + heads + heads)" and rules["blocks.*.mlp.fc2"] == "rowwise"
    assert derived.whole == {"head": "an output of the model"}


def test_timm_mixer():
    module = library("timm.models.mlp_mixer")
    rules, _ = rules_of(module.MlpMixer(img_size=16, patch_size=4, embed_dim=32, num_blocks=2, num_classes=10), IMAGE)
    assert rules["blocks.*.mlp_tokens.fc1"] == rules["blocks.*.mlp_channels.fc1"] == "colwise"


def test_timm_layers_with_parameters_of_their_own():
    module = library("timm.models.beit")
    sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=10, init_values=0.1)
    rules, derived = rules_of(module.Beit(**sizes), IMAGE)
    assert rules["blocks.*.mlp.fc1"] == "colwise" and "a concatenation" in derived.whole["blocks.0.attn.qkv"]


def test_torchvision_vision_transformer():
    module = library("torchvision.models.vision_transformer")
    sizes = dict(image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=72, num_classes=10)
    rules, _ = rules_of(module.VisionTransformer(**sizes), IMAGE)
    assert "multihead(heads)" in rules.values() and "rowwise(heads)" in rules.values()


def test_diffusers_transformer():
    module = library("diffusers")
    sizes = dict(num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_width=8, sample_height=8)
    sizes |= dict(in_channels=4, out_channels=4, time_embed_dim=12, text_embed_dim=20, sample_frames=5, patch_size=2)
    model = module.CogVideoXTransformer3DModel(**sizes, temporal_compression_ratio=4, max_text_seq_length=5)
    inputs = dict(hidden_states=torch.zeros(2, 2, 4, 8, 8), encoder_hidden_states=torch.zeros(2, 5, 20))
    rules, _ = rules_of(model, {**inputs, "timestep": torch.zeros(2, dtype=torch.long), "return_dict": False})
    assert rules["transformer_blocks.*.attn1.to_{q,k,v}"] == "colwise(heads)"
    assert rules["transformer_blocks.*.attn1.to_out.0"] == "rowwise(heads)"
    assert rules["transformer_blocks.*.attn1.norm_{q,k}"] == "replicate(gradient=partial)"


LLAMA = dict(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=72, bias=False)


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, r"colwise\(heads \+ heads \+ heads\)"),
        ({"n_query_groups": 4, "parallel_residual": False, **LLAMA}, r"colwise\(heads \+ (\w+) \+ \1\)"),
    ],
    ids=["neox", "llama"],
)
def test_litgpt(options, packed):
    module = library("litgpt.model")
    config = module.Config(
        block_size=32, padded_vocab_size=53, vocab_size=53, n_layer=2, n_head=8, n_embd=48, **options
    )
    rules, derived = rules_of(module.GPT(config), IDS)
    assert re.fullmatch(packed, rules["transformer.h.*.attn.qkv"])
    assert derived.share > 0.98 and derived.plan.regions


def test_x_transformers():
    module = library("x_transformers")
    layers = module.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    rules, derived = rules_of(module.TransformerWrapper(num_tokens=53, max_seq_len=32, attn_layers=layers), IDS)
    assert rules["attn_layers.layers.*.1.ff.2"] == "rowwise" and rules["token_emb.emb"] == "embedding"
    assert not any("attn_layers" in name for name in derived.whole)
    assert rules["attn_layers.layers.*.*.to_out"] == "rowwise(heads)"
    local = {item.attribute for item in derived.plan.local}
    assert local & {"heads", "_axes_lengths.0.1"}  # of the attention, or of its layer of einops
